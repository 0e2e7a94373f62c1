// The combination of v, its gradient and a wave that an operator lengthens most (`best_combinations` in norms.py), and
// the gradient there: one pass over the vectors to know all products between them, and one to combine them.
#pragma once
#include "products.h"

namespace {

constexpr int PARTS = 4, CHUNK = 4096;  // vectors to combine; numbers summed in fp32 before fp64 takes over
constexpr double SMALLEST = 1.17549435e-38;
typedef double Square[PARTS][PARTS];

// Chunks are summed in their own order, so results do not depend on threads.
template <int N, class F>
void summed(long size, int threads, double (&sums)[N], F each) {
    const long chunks = (size + CHUNK - 1) / CHUNK;
    std::vector<double> parts(chunks * N);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long c = 0; c < chunks; ++c) each(c * CHUNK, std::min(size, (c + 1) * CHUNK), &parts[c * N]);
    std::fill_n(sums, N, 0.0);
    for (long i = 0; i < chunks * N; ++i) sums[i % N] += parts[i];
}

// All products between the vectors x.
void products(const float* const (&x)[PARTS], long size, int threads, Square& gram) {
    double sums[PARTS * (PARTS + 1) / 2];
    summed(size, threads, sums, [&](long from, long to, double* found) {
        V acc[PARTS * (PARTS + 1) / 2] = {};
        long p = from;
        for (; p + LANES <= to; p += LANES) {
            V y[PARTS];
#pragma GCC unroll 4
            for (int i = 0; i < PARTS; ++i) y[i] = load(x[i] + p);
#pragma GCC unroll 4
            for (int i = 0, at = 0; i < PARTS; ++i)
#pragma GCC unroll 4
                for (int j = 0; j <= i; ++j, ++at) acc[at] += y[i] * y[j];
        }
        for (int i = 0, at = 0; i < PARTS; ++i)
            for (int j = 0; j <= i; ++j, ++at) {
                found[at] = total(acc[at]);
                for (long q = p; q < to; ++q) found[at] += x[i][q] * x[j][q];
            }
    });
    for (int i = 0, at = 0; i < PARTS; ++i)
        for (int j = 0; j <= i; ++j, ++at) gram[i][j] = gram[j][i] = sums[at];
}

void combine(const double (&mix)[PARTS], const float* const (&x)[PARTS], long size, int threads, float* to) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long p = 0; p < size; ++p) {
        float sum = 0;
#pragma GCC unroll 4
        for (int i = 0; i < PARTS; ++i) sum += (float)mix[i] * x[i][p];
        to[p] = sum;
    }
}

// Jacobi's method: eigenvalues on the diagonal, vectors in the columns.
void diagonalise(Square& a, int size, Square& vectors) {
    for (int i = 0; i < PARTS; ++i)
        for (int j = 0; j < PARTS; ++j) vectors[i][j] = i == j;
    for (int sweep = 0; sweep < 12; ++sweep)
        for (int p = 0; p < size; ++p)
            for (int q = p + 1; q < size; ++q) {
                if (std::abs(a[p][q]) <= 1e-18 * (std::abs(a[p][p]) + std::abs(a[q][q])) || !std::isfinite(a[p][q]))
                    continue;
                double theta = (a[q][q] - a[p][p]) / (2 * a[p][q]);
                double t = (theta < 0 ? -1 : 1) / (std::abs(theta) + std::sqrt(theta * theta + 1));
                double c = 1 / std::sqrt(t * t + 1), s = t * c;
                auto turn = [&](double& x, double& y) {
                    double old = x;
                    x = c * x - s * y, y = s * old + c * y;
                };
                for (int i = 0; i < size; ++i) turn(a[i][p], a[i][q]);
                for (int i = 0; i < size; ++i) turn(a[p][i], a[q][i]);
                for (int i = 0; i < size; ++i) turn(vectors[i][p], vectors[i][q]);
            }
}

// The first vector takes part as it is; directions with less than `independent` beside it (squared) are left out.
void best_mix(const Square& gram, const Square& images, double independent, double (&mix)[PARTS]) {
    double shorten[PARTS], along[PARTS];
    for (int i = 0; i < PARTS; ++i) shorten[i] = 1 / std::sqrt(std::max(gram[i][i], SMALLEST));
    for (int i = 1; i < PARTS; ++i) along[i] = gram[i][0] * shorten[i] * shorten[0];
    Square beside = {}, directions, whiten = {}, reached = {}, tops;
    for (int i = 1; i < PARTS; ++i)
        for (int j = 1; j < PARTS; ++j)
            beside[i - 1][j - 1] = gram[i][j] * shorten[i] * shorten[j] - along[i] * along[j];
    diagonalise(beside, PARTS - 1, directions);
    whiten[0][0] = shorten[0];
    for (int k = 1; k < PARTS; ++k) {
        double size = beside[k - 1][k - 1];
        if (!(size > independent)) continue;
        for (int i = 1; i < PARTS; ++i) {
            double share = directions[i - 1][k - 1] / std::sqrt(size);
            whiten[k][i] = share * shorten[i], whiten[k][0] -= share * along[i] * shorten[0];
        }
    }
    for (int k = 0; k < PARTS; ++k)
        for (int l = 0; l < PARTS; ++l)
            for (int i = 0; i < PARTS; ++i)
                for (int j = 0; j < PARTS; ++j) reached[k][l] += whiten[k][i] * images[i][j] * whiten[l][j];
    diagonalise(reached, PARTS, tops);
    int top = 0;
    for (int k = 1; k < PARTS; ++k)
        if (reached[k][k] > reached[top][top]) top = k;
    for (int i = 0; i < PARTS; ++i) {
        mix[i] = 0;
        for (int k = 0; k < PARTS; ++k) mix[i] += tops[k][top] * whiten[k][i];
    }
}

double product(const double (&mix)[PARTS], const Square& gram) {
    double sum = 0;
    for (int i = 0; i < PARTS; ++i)
        for (int j = 0; j < PARTS; ++j) sum += mix[i] * gram[i][j] * mix[j];
    return sum;
}

struct Longest {
    double square, by_wave;  // its image's length squared; the image's length over a wave's own, of the better wave
};

// Of the vectors x and their images y: the combination of length 1 with the longest image, and that image. The last two
// are waves.
Longest longest(const float* const (&x)[PARTS], const float* const (&y)[PARTS], long inputs, long outputs, int threads,
               double independent, float* vector, float* image) {
    Square gram, image_gram;
    products(x, inputs, threads, gram), products(y, outputs, threads, image_gram);
    double mix[PARTS];
    best_mix(gram, image_gram, independent, mix);
    double length = std::sqrt(std::max(product(mix, gram), SMALLEST));
    for (double& share : mix) share /= length;
    combine(mix, x, inputs, threads, vector);
    combine(mix, y, outputs, threads, image);
    double best = 0;
    for (int i = 2; i < PARTS; ++i) best = std::max(best, image_gram[i][i] / std::max(gram[i][i], SMALLEST));
    return {std::max(product(mix, image_gram), 0.0), std::sqrt(best)};
}

// In place of `pulled`, A^T A v, the gradient A^T A v - |A v|^2 v; gives its length.
double gradient(const float* v, float square, long inputs, int threads, float* pulled) {
    double squares[1];
    summed(inputs, threads, squares, [&](long from, long to, double* found) {
        for (long p = from; p < to; ++p) pulled[p] -= square * v[p];
        *found = dot(pulled + from, pulled + from, to - from);
    });
    return std::sqrt(squares[0]);
}

}  // namespace
