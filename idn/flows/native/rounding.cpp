// What rounding to bf16 does to weights, without making a rounded one.
#include "products.h"

namespace {

// To the nearest, and to even between two.
inline V rounded(V x) {
    I bits = (I)x;
    return (V)((bits + 0x7fff + (bits >> 16 & 1)) & ~0xffff);
}

// A function of vectors of a row, summed; `row` may have any length.
template <class F>
double summed(int length, F each) {
    V sum = {};
    int i = 0;
    for (; i + LANES <= length; i += LANES) sum += each(i, LANES);
    if (i < length) sum += each(i, length - i);
    return total(sum);
}

inline V load_part(const float* p, int count) {
    if (count == LANES) return load(p);
    float part[LANES] = {};
    std::copy_n(p, count, part);
    return load(part);
}

// Rows are summed in their own order, so results do not depend on threads.
template <class F>
void each_matrix(int matrices, int rows, int threads, float* found, F row) {
    std::vector<double> sums((size_t)matrices * rows);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int i = 0; i < matrices * rows; ++i) sums[i] = row(i / rows, i % rows);
    for (int i = 0; i < matrices; ++i) {
        double sum = 0;
        for (int j = 0; j < rows; ++j) sum += sums[(size_t)i * rows + j];
        found[i] = sum;
    }
}

}  // namespace

extern "C" {

// The squared length of what rounding adds to a matrix times its factor.
void rounding_errors(int matrices, int rows, int columns, int threads, const float* weight, const float* factors,
                     float* found) {
    each_matrix(matrices, rows, threads, found, [&](int matrix, int row) {
        const float* from = weight + ((size_t)matrix * rows + row) * columns;
        return summed(columns, [&](int i, int count) {
            V exact = load_part(from + i, count) * factors[matrix], error = rounded(exact) - exact;
            return error * error;
        });
    });
}

// The sum of rounded entries times those of u v^T; without u, of a matrix v.
void rounded_along(int matrices, int rows, int columns, int threads, const float* weight, const float* factors,
                   const float* u, const float* v, float* found) {
    each_matrix(matrices, rows, threads, found, [&](int matrix, int row) {
        size_t at = (size_t)matrix * rows + row;
        const float *from = weight + at * columns, *along = v + (u ? matrix : at) * columns;
        double sum = summed(columns, [&](int i, int count) {
            return rounded(load_part(from + i, count) * factors[matrix]) * load_part(along + i, count);
        });
        return u ? sum * u[at] : sum;
    });
}

// The factor for a convolution's weight, given the slope of its sigma: `_outweigh_rounding` in layers.py.
void outweigh_rounding(int outputs, int inputs, int taps, int threads, float coeff, const float* rules,
                       const float* const* tensors, float* shrink) {
    const float *weight = tensors[0], *slope = tensors[1], norm = *tensors[2] * (1 + *tensors[3]);
    const float noise_share = rules[0], beyond = rules[1], eps = rules[2];
    const float bounding = 1 / std::max(norm / coeff, 1.0f);
    float square, along;
    rounding_errors(1, outputs, inputs * taps, threads, weight, &bounding, &square);
    const float spread = 1 / std::sqrt((float)inputs) + 1 / std::sqrt((float)outputs);
    const float noise = noise_share * std::sqrt(square) * spread;
    const float found = coeff / std::max(std::min(norm, coeff) + noise, coeff), factor = bounding * found;
    rounded_along(1, outputs, inputs * taps, threads, weight, &factor, nullptr, slope, &along);
    *shrink = along > coeff * (1 + beyond) ? found * (coeff / along - eps / 2) : found;
}
}
