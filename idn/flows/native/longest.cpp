#include "mixes.h"

extern "C" {

// For each operator: of two pairs of vectors and their images, the combination of length 1 with the longest image, that
// image, and its length squared.
void longest(int operators, int64_t inputs, int64_t outputs, int threads, float independent, const float* pair,
             const float* wave, const float* applied, const float* responses, float* vector, float* image,
             float* squares) {
    for (int o = 0; o < operators; ++o) {
        auto parts = [&](const float* a, const float* b, long size, const float* (&x)[PARTS]) {
            for (int i = 0; i < PARTS; ++i) x[i] = (i < 2 ? a : b) + ((size_t)2 * o + i % 2) * size;
        };
        const float *basis[PARTS], *images[PARTS];
        parts(pair, wave, inputs, basis), parts(applied, responses, outputs, images);
        float *own = vector + o * inputs, *own_image = image + o * outputs;
        squares[o] = longest(basis, images, inputs, outputs, threads, independent, own, own_image).square;
    }
}

// In place of `pulled`, A^T A v, the gradient A^T A v - |A v|^2 v; and its length.
void gradients(int operators, int64_t inputs, int threads, const float* vector, const float* squares, float* pulled,
               float* lengths) {
    for (int o = 0; o < operators; ++o)
        lengths[o] = gradient(vector + o * inputs, squares[o], inputs, threads, pulled + o * inputs);
}
}
