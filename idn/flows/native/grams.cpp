// Products A^T A of tall matrices, or A A^T of wide ones; of the symmetric result little more than half is computed.
#include "products.h"

namespace {

constexpr int CHUNK = 192;  // rows that are in the cache at a time

// Adds the product of rows with themselves, where columns are not before those of their panel.
void add(const float* rows, int count, int n, int row, float* sum) {
    Left left = {rows, 4, 4l * row};
    for (int v = 0; v < row; v += PANEL * LANES) {
        int vectors = std::min(PANEL, (row - v) / LANES), above = std::min(n, v + vectors * LANES);
        if (vectors == 3) panel<Full, 3>(left, rows + v, row, count, above, sum + v, row, true);
        if (vectors == 2) panel<Full, 2>(left, rows + v, row, count, above, sum + v, row, true);
        if (vectors == 1) panel<Full, 1>(left, rows + v, row, count, above, sum + v, row, true);
    }
}

}  // namespace

extern "C" void grams(int matrices, int outputs, int inputs, int threads, const float* weight, float* found) {
    const bool wide = outputs <= inputs;
    const int n = wide ? outputs : inputs, m = wide ? inputs : outputs, row = up(n, LANES);
    const int chunks = (m + CHUNK - 1) / CHUNK;
    // A slot takes every threads-th chunk; what slots sum is added in their order.
    std::vector<float> sums((size_t)threads * n * row);
    for (int i = 0; i < matrices; ++i, weight += (size_t)n * m, found += (size_t)n * n) {
#pragma omp parallel for num_threads(threads) schedule(static, 1)
        for (int slot = 0; slot < threads; ++slot) {
            float* sum = &sums[(size_t)slot * n * row];
            std::fill_n(sum, (size_t)n * row, 0.0f);
            std::vector<float> rows((size_t)CHUNK * row);
            for (int chunk = slot; chunk < chunks; chunk += threads) {
                int from = chunk * CHUNK, count = std::min(CHUNK, m - from);
                if (wide)
                    for (int j = 0; j < n; ++j)
                        for (int r = 0; r < count; ++r) rows[r * row + j] = weight[(size_t)j * m + from + r];
                else
                    for (int r = 0; r < count; ++r) std::copy_n(weight + (size_t)(from + r) * n, n, &rows[r * row]);
                add(rows.data(), count, n, row, sum);
            }
        }
        for (int j = 0; j < n; ++j)
            for (int l = j; l < n; ++l) {
                float total = 0;
                for (int slot = 0; slot < threads; ++slot) total += sums[((size_t)slot * n + j) * row + l];
                found[j * n + l] = found[l * n + j] = total;
            }
    }
}
