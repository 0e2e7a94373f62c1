// Norms of matrices that are small on one side, found and proven as in `matrices.py`, all layers in one call.
#include "lanes.h"

namespace {

constexpr int MOST = 96;  // rows of a Gram matrix
constexpr float TINY = 1.17549435e-38f;

float length(const float* x, int n) { return std::sqrt(dot(x, x, n)); }

void to_unit(float* x, int n) {
    float share = 1 / std::max(length(x, n), TINY);
    for (int i = 0; i < n; ++i) x[i] *= share;
}

float largest(const float* x, int n) {
    V most = all(TINY);
    for (int i = 0; i < n; i += LANES) {
        V next = some(x + i, n - i);
        next = next < 0 ? -next : next;
        most = next > most ? next : most;
    }
    float found = TINY;
    for (int i = 0; i < LANES; ++i) found = std::max(found, most[i]);
    return found;
}

// out = x M for a matrix whose rows are padded to `width` <= MOST.
void times(const float* x, const float* m, int rows, int width, float* out) {
    V sums[MOST / LANES] = {};
    for (int i = 0; i < rows; ++i) {
        V share = all(x[i]);
#pragma GCC unroll 12
        for (int c = 0; c < MOST / LANES; ++c)
            if (c * LANES < width) sums[c] += share * load(m + (size_t)i * width + c * LANES);
    }
    for (int c = 0; c < width; c += LANES) store(out + c, sums[c / LANES]);
}

// out = M x.
void times_right(const float* m, const float* x, int rows, int width, float* out) {
    for (int i = 0; i < rows; ++i) out[i] = dot(m + (size_t)i * width, x, width);
}

// Whether the symmetric matrix, of which only the upper half is read and overwritten, is positive.
bool positive(float* m, int n, int width) {
    for (int k = 0; k < n; ++k) {
        const float* pivot = m + k * width;
        if (!(pivot[k] > 0)) return false;
        for (int i = k + 1; i < n; ++i) {
            V share = all(pivot[i] / pivot[k]);
            float* row = m + i * width;
            for (int c = i / LANES * LANES; c < width; c += LANES) store(row + c, load(row + c) - share * load(pivot + c));
        }
    }
    return true;
}

V rounded(V x) {  // to bf16, ties to even
    I bits = (I)x;
    return (V)((bits + 0x7fff + (bits >> 16 & 1)) & ~0xffff);
}

struct Rules {
    float products, vague, roundoff, noise, allowed, eps;
};

struct Matrix {
    const float* weight;
    float *u, *v, *sigma, *slack, *shrink;
    int outputs, inputs;
    bool low;
    float coeff;

    // Writes u, v, sigma and slack, and shrink for rounded weights; or nothing, and false, where the proof fails.
    bool follow(const Rules& rules, std::vector<float>& space) const {
        bool wide = outputs <= inputs;
        int small = wide ? outputs : inputs, large = wide ? inputs : outputs, width = up(small, LANES);
        space.assign((size_t)(large + 2 * small) * width + 3 * width + large, 0.0f);
        float *columns = space.data(), *gram = columns + (size_t)large * width, *proof = gram + small * width;
        float *vector = proof + small * width, *product = vector + width, *image = product + width;
        float scale = largest(weight, outputs * inputs), share = 1 / scale;
        for (int i = 0; i < inputs; i += LANES)
            for (int o = 0; o < outputs; o += wide ? LANES : 1) {
                const float* from = weight + (size_t)o * inputs + i;
                V block[LANES] = {};
                if (wide)
                    turned(from, inputs, outputs - o, inputs - i, block);
                else
                    block[0] = some(from, inputs - i);
                for (int l = 0; l < (wide ? std::min(LANES, inputs - i) : 1); ++l)
                    store(columns + (wide ? (i + l) * width + o : o * width + i), block[l] * share);
            }
        ::product<Full>({columns, 4, 4L * width}, columns, width, large, small, small, gram, width, false);
        if (wide)
            times(v, columns, large, width, vector);
        else
            std::copy_n(v, small, vector);
        to_unit(vector, small);
        for (int i = 0; i < rules.products; ++i) {
            times(vector, gram, small, width, product);
            std::swap(vector, product);
            to_unit(vector, small);
        }
        times(vector, gram, small, width, product);
        float square = dot(vector, product, small), left = 0;
        for (int i = 0; i < small; ++i) {
            float off = product[i] - square * vector[i];
            left += off * off;
        }
        left = std::sqrt(left);
        if (!(left <= rules.vague * square)) return false;
        float bound = (square + left) * (1 + rules.roundoff);
        for (int i = 0; i < small * width; ++i) proof[i] = -gram[i];
        for (int i = 0; i < small; ++i) proof[i * width + i] += bound;
        if (!positive(proof, small, width)) return false;

        if (wide) {
            times_right(columns, vector, large, width, v);
            to_unit(v, large);
            times(v, columns, large, width, image);
        } else {
            std::copy_n(vector, small, v);
            times_right(columns, vector, large, width, image);
        }
        float norm = length(image, outputs);
        *sigma = norm * scale;
        *slack = std::max(std::sqrt(bound) / norm - 1, 0.0f);
        for (int o = 0; o < outputs; ++o) u[o] = image[o] / norm;
        if (low) *shrink = outweigh_rounding(rules);
        return true;
    }

    // As `_outweigh_rounding` in `layers.py`.
    float outweigh_rounding(const Rules& rules) const {
        float norm = *sigma * (1 + *slack), factor = 1 / std::max(norm / coeff, 1.0f);
        V error = {};
        for (int i = 0, n = outputs * inputs; i < n; i += LANES) {
            V bounded = some(weight + i, n - i) * factor, off = rounded(bounded) - bounded;
            error += off * off;
        }
        float spread = 1 / std::sqrt((float)inputs) + 1 / std::sqrt((float)outputs);
        float noise = rules.noise * std::sqrt(total(error)) * spread;
        float found = coeff / std::max(std::min(norm, coeff) + noise, coeff), square = 0;
        for (int o = 0; o < outputs; ++o) {
            const float* row = weight + (size_t)o * inputs;
            V sum = {};
            for (int i = 0; i < inputs; i += LANES)
                sum += rounded(some(row + i, inputs - i) * factor * found) * some(v + i, inputs - i);
            square += total(sum) * total(sum);
        }
        norm = std::sqrt(square);
        if (norm <= coeff * (1 + rules.allowed)) return found;
        return found * (coeff / std::max(norm, coeff) - rules.eps / 2);
    }
};

}  // namespace

extern "C" {

int matrices_most() { return MOST; }

// ints: outputs, inputs and whether its products are in bf16, of each matrix; pointers: weight, u, v, sigma, slack and
// shrink of each. `proven` says which are done.
void matrices_follow(int count, int threads, const int* ints, const float* coeffs, float* const* pointers,
                     const float* rules, unsigned char* proven) {
#pragma omp parallel num_threads(threads)
    {
        std::vector<float> space;
#pragma omp for schedule(dynamic, 1)
        for (int i = 0; i < count; ++i) {
            float* const* at = pointers + 6 * i;
            const int* shape = ints + 3 * i;
            Matrix matrix = {at[0], at[1], at[2], at[3], at[4], at[5], shape[0], shape[1], shape[2] != 0, coeffs[i]};
            proven[i] = matrix.follow({rules[0], rules[1], rules[2], rules[3], rules[4], rules[5]}, space);
        }
    }
}
}
