// The wave that a convolution lengthens most: the search of waves.py in one call.
//
// K(f) is n x m, n being the smaller of a kernel's two sides. Its taps are packed twice, so that both K(f)* c and K(f) z
// are one product for all frequencies: the rows are real and imaginary parts of their channels, one after the other.
#include "taps.h"

namespace {

constexpr int SQUARINGS = 7;  // a power of 2^7 leaves little but the largest eigenvalue

struct Space {
    std::vector<float> turned, put_in, put_out, image, rest, along, length;
    std::vector<std::vector<float>> vectors;

    Space(const Taps& k, int count, int steps)
        : turned((size_t)2 * count * k.turned_row), put_in((size_t)2 * count * k.m_row),
          put_out((size_t)2 * count * k.taps * k.n_row), image((size_t)2 * count * k.n_row), rest(image), along(count),
          length(count), vectors(steps, image) {}
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

// By so many Lanczos steps with K(f) K(f)* at each frequency: its largest eigenvalue and the channels that have it.
// Channels are rows of n_row floats, in place.
void climb(const Taps& k, const Turns& turns, int count, int steps, float* channels, float* values, Space& s) {
    const int row = 2 * k.n_row;
    const float tiny = 1.17549435e-38f;
    std::vector<std::vector<double>> small(count, std::vector<double>(steps * steps));
    std::copy(channels, channels + (size_t)count * row, s.rest.begin());
    for (int step = 0; step < steps; ++step) {
        auto& vectors = s.vectors[step];
        for (int f = 0; f < count; ++f) {
            float *rest = &s.rest[(size_t)f * row], *vector = &vectors[(size_t)f * row];
            s.length[f] = std::sqrt(dot(rest, rest, row));
            float shorten = 1 / std::max(s.length[f], tiny);
            for (int i = 0; i < row; ++i) vector[i] = rest[i] * shorten;
        }
        k.pull(turns, count, vectors.data(), s.turned.data(), s.put_in.data());
        k.push(turns, count, s.put_in.data(), s.put_out.data(), s.image.data());
        for (int f = 0; f < count; ++f) {
            const float *vector = &vectors[(size_t)f * row], *image = &s.image[(size_t)f * row];
            const float* before = step ? &s.vectors[step - 1][(size_t)f * row] : vector;
            float along = dot(vector, image, row), beside = step ? s.length[f] : 0;
            float* rest = &s.rest[(size_t)f * row];
            for (int i = 0; i < row; ++i) rest[i] = image[i] - along * vector[i] - beside * before[i];
            small[f][step * (steps + 1)] = along;
            if (step) small[f][step * (steps + 1) - 1] = small[f][step * (steps + 1) - steps] = beside;
        }
    }
    std::vector<double> mix;
    for (int f = 0; f < count; ++f, channels += row) {
        values[f] = largest(small[f], steps, mix);
        std::fill_n(channels, row, 0.0f);
        for (int step = 0; step < steps; ++step) {
            const float* vector = &s.vectors[step][(size_t)f * row];
            for (int i = 0; i < row; ++i) channels[i] += (float)mix[step] * vector[i];
        }
        float shorten = 1 / std::max(std::sqrt(dot(channels, channels, row)), tiny);
        for (int i = 0; i < row; ++i) channels[i] *= shorten;
    }
}

// |K(f)* c|^2 at the places around each frequency, the largest of them and where it is. With P_t = K_t^T c it is a sum
// over pairs of taps, which depends on the place only by the taps' distance: `distances` has cos and sin for each.
void best_places(const Taps& k, int count, const float* channels, const float* distances, int places, float* gains,
                 int* place) {
    const int width = 2 * k.kernel - 1, row = k.taps * k.m_row;
    std::vector<float> pulled((size_t)2 * count * row), sums(2 * width * width);
    k.each_tap(2 * count, channels, pulled.data());
    for (int f = 0; f < count; ++f) {
        const float *real = &pulled[(size_t)2 * f * row], *imaginary = real + row;
        std::fill(sums.begin(), sums.end(), 0.0f);
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
        gains[f] = -1;
        for (int p = 0; p < places; ++p, distances += sums.size()) {
            float gain = dot(distances, sums.data(), sums.size());
            if (gain > gains[f]) gains[f] = gain, place[f] = p;
        }
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
        climb(k, Turns(k, frequencies + 2 * from, count), count, most, own, &squares[from], space);
        best_places(k, count, own, distances + (size_t)from * places * table, places, &gains[from], &place[from]);
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
