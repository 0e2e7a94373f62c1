// The wave that a convolution lengthens most: the search of waves.py in one call.
//
// K(f) is n x m, n being the smaller of a kernel's two sides. Its taps are packed twice, so that both K(f)* c and K(f) z
// are one product for all frequencies: the rows are real and imaginary parts of their channels, one after the other.
#include "taps.h"

namespace {

constexpr float TINY = 1.17549435e-38f;
constexpr int SQUARINGS = 7;  // a power of 2^7 leaves little but the largest eigenvalue

struct Space {
    std::vector<float> put_in, pushed, image, rest, length;
    std::vector<std::vector<float>> vectors, pulled;  // of every step

    Space(const Taps& k, int count, int steps)
        : put_in((size_t)2 * count * k.m_row), pushed((size_t)2 * count * k.taps * k.n_row),
          image((size_t)2 * count * k.n_row), rest(image), length(count), vectors(steps, image),
          pulled(steps, std::vector<float>((size_t)2 * count * k.taps * k.m_row)) {}
};

// Largest eigenvalue of a symmetric matrix without negative ones, and its vector, by squaring.
double largest(const std::vector<double>& matrix, int size, std::vector<double>& vector) {
    std::vector<double> power = matrix, squared(size * size);
    auto top = [&] {
        int best = 0;
        for (int i = 1; i < size; ++i)
            if (power[i * size + i] > power[best * size + best]) best = i;
        return best;
    };
    for (int squaring = 0; squaring < SQUARINGS; ++squaring) {
        double scale = 1 / std::max(power[top() * (size + 1)], 1e-300);
        for (double& x : power) x *= scale;
        for (int i = 0; i < size; ++i)
            for (int j = 0; j < size; ++j) {
                double sum = 0;
                for (int l = 0; l < size; ++l) sum += power[i * size + l] * power[l * size + j];
                squared[i * size + j] = sum;
            }
        power.swap(squared);
    }
    double square = 0, value = 0;
    vector.assign(&power[top() * size], &power[top() * size] + size);
    for (double x : vector) square += x * x;
    for (double& x : vector) x /= std::max(std::sqrt(square), 1e-300);
    for (int i = 0; i < size; ++i)
        for (int j = 0; j < size; ++j) value += vector[i] * matrix[i * size + j] * vector[j];
    return value;
}

// sum_s mix_s x_s
void combine(const std::vector<double>& mix, const std::vector<std::vector<float>>& x, size_t from, int row, float* to) {
    std::fill_n(to, row, 0.0f);
    for (size_t step = 0; step < mix.size(); ++step)
        for (int i = 0; i < row; ++i) to[i] += (float)mix[step] * x[step][from + i];
}

// By so many Lanczos steps with K(f) K(f)* at each frequency: its largest eigenvalue, and the channels that have it, in
// rows of n_row floats, in place. Gives their mixes of the steps' vectors.
std::vector<std::vector<double>> climb(const Taps& k, const Turns& turns, int count, int steps, float* channels,
                                       float* values, Space& s) {
    const int row = 2 * k.n_row;
    std::vector<std::vector<double>> small(count, std::vector<double>(steps * steps)), mixes(count);
    std::copy(channels, channels + (size_t)count * row, s.rest.begin());
    for (int step = 0; step < steps; ++step) {
        float* vectors = s.vectors[step].data();
        for (int f = 0; f < count; ++f) {
            const float* rest = &s.rest[(size_t)f * row];
            s.length[f] = std::sqrt(dot(rest, rest, row));
            for (int i = 0; i < row; ++i) vectors[f * row + i] = rest[i] / std::max(s.length[f], TINY);
        }
        k.pull_each(2 * count, vectors, s.pulled[step].data());
        turn(turns, k.taps, -1, count, s.pulled[step].data(), k.m_row, s.put_in.data());
        for (int f = 0; f < count; ++f) {
            const float* put_in = &s.put_in[(size_t)f * 2 * k.m_row];
            small[f][step * (steps + 1)] = dot(put_in, put_in, 2 * k.m_row);
            if (step) small[f][step * (steps + 1) - 1] = small[f][step * (steps + 1) - steps] = s.length[f];
        }
        if (step + 1 == steps) break;
        k.push_each(2 * count, s.put_in.data(), s.pushed.data());
        turn(turns, k.taps, 1, count, s.pushed.data(), k.n_row, s.image.data());
        for (int f = 0; f < count; ++f) {
            const float *vector = vectors + f * row, *image = &s.image[(size_t)f * row];
            const float* before = step ? &s.vectors[step - 1][(size_t)f * row] : vector;
            float along = small[f][step * (steps + 1)], beside = step ? s.length[f] : 0;
            for (int i = 0; i < row; ++i) s.rest[f * row + i] = image[i] - along * vector[i] - beside * before[i];
        }
    }
    for (int f = 0; f < count; ++f) {
        float* own = channels + f * row;
        values[f] = largest(small[f], steps, mixes[f]);
        combine(mixes[f], s.vectors, (size_t)f * row, row, own);
        float length = std::max(std::sqrt(dot(own, own, row)), TINY);
        for (int i = 0; i < row; ++i) own[i] /= length;
        for (double& share : mixes[f]) share /= length;
    }
    return mixes;
}

// |K(f)* c|^2 at the places around a frequency: the largest, and where it is. With P_t = K_t^T c, `pulled`, it is a sum
// over pairs of taps, which depends on the place only by the taps' distance: `distances` has cos and sin for each.
void best_place(const Taps& k, const float* pulled, const float* distances, int places, float& best, int& place) {
    const int width = 2 * k.kernel - 1;
    const float *real = pulled, *imaginary = real + k.taps * k.m_row;
    std::vector<float> sums(2 * width * width);
    for (int a = 0; a < k.taps; ++a)
        for (int b = 0; b <= a; ++b) {
            V alike[2] = {}, apart[2] = {};
            for (int i = 0; i < k.m_row; i += LANES) {
                V x = load(real + a * k.m_row + i), y = load(imaginary + a * k.m_row + i);
                V z = load(real + b * k.m_row + i), w = load(imaginary + b * k.m_row + i);
                alike[0] += x * z, alike[1] += y * w, apart[0] += y * z, apart[1] -= x * w;
            }
            int down = a / k.kernel - b / k.kernel, right = a % k.kernel - b % k.kernel;
            int at = 2 * ((down + k.kernel - 1) * width + right + k.kernel - 1), times = a == b ? 1 : 2;
            sums[at] += times * total(alike[0] + alike[1]);
            sums[at + 1] += times * total(apart[0] + apart[1]);
        }
    best = -1;
    for (int p = 0; p < places; ++p, distances += sums.size()) {
        float gain = dot(distances, sums.data(), sums.size());
        if (gain > best) best = gain, place = p;
    }
}

// The slots share the rows evenly.
template <class F>
void share(int count, int threads, F each) {
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (int slot = 0; slot < threads; ++slot) {
        int from = count * slot / threads, to = count * (slot + 1) / threads;
        if (to > from) each(from, to - from);
    }
}

void search(const Taps& k, int h, int w, int grid, int places, int best, int steps, int threads,
            const float* frequencies, const float* around, const float* distances, const float* noise, float* kept,
            float* gain, float* images, float* responses) {
    const int row = 2 * k.n_row, table = 2 * (2 * k.kernel - 1) * (2 * k.kernel - 1);
    std::vector<float> channels((size_t)grid * row), gains(grid), squares(grid);
    std::vector<int> place(grid), order(grid);
    for (int i = 0; i < 2 * grid; ++i)
        for (int j = 0; j < k.n; ++j) channels[i * k.n_row + j] = kept[i * k.n + j] + noise[i % 2 * k.n + j];
    share(grid, threads, [&](int from, int count) {
        int most = std::min(steps, k.n);
        Space space(k, count, most);
        float* own = &channels[(size_t)from * row];
        auto mixes = climb(k, Turns(k, frequencies + 2 * from, count), count, most, own, &squares[from], space);
        const int size = 2 * k.taps * k.m_row;
        std::vector<float> pulled(size);
        for (int f = 0; f < count; ++f) {
            combine(mixes[f], space.pulled, (size_t)f * size, size, pulled.data());
            const float* near = distances + (size_t)(from + f) * places * table;
            best_place(k, pulled.data(), near, places, gains[from + f], place[from + f]);
        }
    });
    for (int i = 0; i < 2 * grid; ++i) std::copy_n(&channels[(size_t)i * k.n_row], k.n, kept + i * k.n);

    for (int i = 0; i < grid; ++i) order[i] = i;
    std::partial_sort(order.begin(), order.begin() + best, order.end(),
                      [&](int a, int b) { return gains[a] > gains[b] || (gains[a] == gains[b] && a < b); });
    std::vector<float> moved(2 * best), chosen((size_t)best * row);
    for (int i = 0; i < best; ++i) {
        const float* offset = around + 2 * place[order[i]];
        for (int axis = 0; axis < 2; ++axis) moved[2 * i + axis] = frequencies[2 * order[i] + axis] + offset[axis];
        std::copy_n(&channels[(size_t)order[i] * row], row, &chosen[(size_t)i * row]);
    }
    share(best, threads, [&](int from, int count) {
        int most = std::min(steps + 1, k.n);
        Space space(k, count, most);
        climb(k, Turns(k, &moved[2 * from], count), count, most, &chosen[(size_t)from * row], &squares[from], space);
    });
    int first = std::max_element(squares.begin(), squares.begin() + best) - squares.begin();
    *gain = std::sqrt(std::max(squares[first], 0.0f));
    fade(k, &moved[2 * first], &chosen[(size_t)first * row], h, w, threads, images, responses);
}

}  // namespace

// `ints`: convolutions, outputs, inputs, kernel, height, width, frequencies, places, best, steps, threads.
extern "C" void strongest_waves(const int* ints, const float* weight, const float* frequencies, const float* around,
                                const float* distances, const float* noise, float* kept, float* gain, float* images,
                                float* responses) {
    const int convolutions = ints[0], outputs = ints[1], inputs = ints[2], kernel = ints[3], h = ints[4], w = ints[5];
    const int grid = ints[6], threads = ints[10];
    for (int i = 0; i < convolutions; ++i) {
        Taps taps(weight + (size_t)i * outputs * inputs * kernel * kernel, outputs, inputs, kernel, threads);
        search(taps, h, w, grid, ints[7], std::min(ints[8], grid), ints[9], threads, frequencies, around, distances,
               noise, kept + (size_t)i * 2 * grid * taps.n, gain + i, images + (size_t)i * 2 * inputs * h * w,
               responses + (size_t)i * 2 * outputs * h * w);
    }
}
