// The wave that a convolution lengthens most: the search of waves.py in one call.
//
// K(f) is made for a frequency at a time, and stays in the cache for all of its steps: with nine taps that is a quarter
// of the arithmetic of applying each of them to the channels of all frequencies at every step.
#pragma once
#include "taps.h"

namespace {

constexpr float TINY = 1.17549435e-38f;
// As in waves.py.
constexpr int SQUARINGS = 7, CLIMBS = 2, CLIMB_STEPS = 3;
constexpr float NEAR = 0.2f, FURTHER = 1.5f;

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

// By so many Lanczos steps with K(f) K(f)* at one frequency: its largest eigenvalue, and the channels that have it, in
// place.
struct Climb {
    const Taps& k;
    const int steps, row;
    std::vector<float> vectors, image, put_in;
    std::vector<double> small, mix;

    Climb(const Taps& k, int steps)
        : k(k), steps(steps), row(2 * k.n_row), vectors(steps * row), image(row), put_in(2 * k.m_row),
          small(steps * steps) {}

    float operator()(Symbol& symbol, float* channels) {
        const float* rest = channels;
        for (int step = 0; step < steps; ++step) {
            float *vector = &vectors[step * row], length = std::sqrt(dot(rest, rest, row));
            for (int i = 0; i < row; ++i) vector[i] = rest[i] / std::max(length, TINY);
            symbol.pull(vector, put_in.data(), step + 1 < steps ? image.data() : nullptr);
            float along = small[step * (steps + 1)] = dot(put_in.data(), put_in.data(), 2 * k.m_row);
            if (step) small[step * (steps + 1) - 1] = small[step * (steps + 1) - steps] = length;
            if (step + 1 == steps) break;
            const float *before = step ? vector - row : vector, beside = step ? length : 0;
            for (int i = 0; i < row; ++i) image[i] -= along * vector[i] + beside * before[i];
            rest = image.data();
        }
        double value = largest(small, steps, mix);
        std::fill_n(channels, row, 0.0f);
        for (int step = 0; step < steps; ++step)
            for (int i = 0; i < row; ++i) channels[i] += (float)mix[step] * vectors[step * row + i];
        float length = std::max(std::sqrt(dot(channels, channels, row)), TINY);
        for (int i = 0; i < row; ++i) channels[i] /= length;
        return value;
    }
};

// The same at several frequencies, whose channels stand one behind the other. TOGETHER symbols are at hand.
constexpr int TOGETHER = 4;
void climb(Symbol* symbols, const float* frequencies, int count, int steps, float* channels, float* values) {
    Climb up(symbols->k, steps);
    int f = 0;
    auto some = [&](auto size) {
        for (; f + size <= count; f += size) {
            Symbol::make<size>(symbols, frequencies + 2 * f);
            for (int i = 0; i < size; ++i) values[f + i] = up(symbols[i], channels + (size_t)(f + i) * up.row);
        }
    };
    some(std::integral_constant<int, TOGETHER>());
    some(std::integral_constant<int, 2>());
    some(std::integral_constant<int, 1>());
}

// |K(f)* c|^2 as a sum over distances d between taps of cos(f.d) and sin(f.d), of which these are the factors, d row by
// row: with P_t = K_t^T c, `pulled`, it is a sum over pairs of taps, which depends on f only by their distance.
struct Hill {
    const int width;
    std::vector<float> sums;

    Hill(const Taps& k, const float* pulled) : width(2 * k.kernel - 1), sums(2 * width * width) {
        const float *real = pulled, *imaginary = real + k.taps * k.m_row;
        for (int a = 0; a < k.taps; ++a)
            for (int b = 0; b <= a; ++b) {
                V alike[2] = {}, apart[2] = {};
                for (int i = 0; i < up(k.m, LANES); i += LANES) {
                    V x = load(real + a * k.m_row + i), y = load(imaginary + a * k.m_row + i);
                    V z = load(real + b * k.m_row + i), w = load(imaginary + b * k.m_row + i);
                    alike[0] += x * z, alike[1] += y * w, apart[0] += y * z, apart[1] -= x * w;
                }
                int down = a / k.kernel - b / k.kernel, right = a % k.kernel - b % k.kernel;
                int at = 2 * ((down + k.kernel - 1) * width + right + k.kernel - 1), times = a == b ? 1 : 2;
                sums[at] += times * total(alike[0] + alike[1]);
                sums[at + 1] += times * total(apart[0] + apart[1]);
            }
    }

    // The largest at the places around a frequency, and where it is: `distances` has cos and sin for each.
    void best_place(const float* distances, int places, float& best, int& place) const {
        best = -1;
        for (int p = 0; p < places; ++p, distances += sums.size()) {
            float gain = dot(distances, sums.data(), sums.size());
            if (gain > best) best = gain, place = p;
        }
    }

    // A step of Newton's towards the largest near by, and somewhat further: `uphill` in waves.py.
    void uphill(float* frequency) const {
        double slope[2] = {}, a = 0, b = 0, c = 0;
        for (int i = 0; i < width * width; ++i) {
            const int down = i / width - width / 2, right = i % width - width / 2;
            const double angle = (double)frequency[0] * down + (double)frequency[1] * right;
            const double cos = std::cos(angle), sin = std::sin(angle);
            const double rises = cos * sums[2 * i + 1] - sin * sums[2 * i];
            const double bends = cos * sums[2 * i] + sin * sums[2 * i + 1];
            slope[0] += rises * down, slope[1] += rises * right;
            a += bends * down * down, b += bends * down * right, c += bends * right * right;
        }
        if (!(a > 0 && a * c > b * b)) a = c = std::sqrt(a * a + 2 * b * b + c * c), b = 0;
        const double scale = FURTHER / std::max<double>(a * c - b * b, TINY);
        const double move[2] = {scale * (c * slope[0] - b * slope[1]), scale * (a * slope[1] - b * slope[0])};
        const double most = NEAR / std::max<double>(std::hypot(move[0], move[1]), NEAR);
        for (int axis = 0; axis < 2; ++axis) frequency[axis] += most * move[axis];
    }
};

// The slots share the rows evenly.
template <class F>
void share(int count, int threads, F each) {
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (int slot = 0; slot < threads; ++slot) {
        int from = count * slot / threads, to = count * (slot + 1) / threads;
        if (to > from) each(slot, from, to - from);
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
    // Made here, since threads would take them from heaps of their own.
    std::vector<Symbol> symbols;
    for (int i = 0; i < TOGETHER * threads; ++i) symbols.emplace_back(k);
    const size_t size = (size_t)2 * k.taps * k.m_row;
    const Space all_pulled = space(grid * size);
    share(grid, threads, [&](int slot, int from, int count) {
        float* own = &channels[(size_t)from * row];
        climb(&symbols[TOGETHER * slot], frequencies + 2 * from, count, std::min(steps, k.n), own, &squares[from]);
        float* pulled = &all_pulled[from * size];
        k.pull_each(2 * count, own, pulled);
        for (int f = 0; f < count; ++f) {
            const float* near = distances + (size_t)(from + f) * places * table;
            Hill(k, &pulled[f * size]).best_place(near, places, gains[from + f], place[from + f]);
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
    share(best, threads, [&](int slot, int from, int count) {
        float* own = &chosen[(size_t)from * row];
        float* pulled = &all_pulled[from * size];
        auto climbed = [&](int most) {
            climb(&symbols[TOGETHER * slot], &moved[2 * from], count, std::min(most, k.n), own, &squares[from]);
        };
        climbed(steps + 1);
        for (int time = 0; time < CLIMBS; ++time) {
            k.pull_each(2 * count, own, pulled);
            for (int f = 0; f < count; ++f) Hill(k, &pulled[f * size]).uphill(&moved[2 * (from + f)]);
            climbed(CLIMB_STEPS);
        }
    });
    int first = std::max_element(squares.begin(), squares.begin() + best) - squares.begin();
    *gain = std::sqrt(std::max(squares[first], 0.0f));
    fade(k, &moved[2 * first], &chosen[(size_t)first * row], h, w, threads, images, responses);
}

}  // namespace
