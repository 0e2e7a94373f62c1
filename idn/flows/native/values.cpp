// Values of dense branches of images by Winograd's algorithm: what the inverse asks for again and again.
//
// A tile of 4x4 pixels of a 3x3 convolution takes 36 products of two channels instead of 144: tiles of what enters and
// taps are both turned to 36 numbers, multiplied one by one, and what comes out is turned back. What a layer adds is turned
// once for all that read it. Sums are nine times shorter, which makes up for what turning adds to rounding errors.
#include "branch.h"
#include "pixels.h"

namespace {

struct Call {  // as `values.py` passes it
    int32_t threads, channels, height, width, depth, images, together;
    int32_t enters, mirrored;  // whether x goes through silu before, times a number; silu(q) is followed by silu(-q)
    float scale;
    const int32_t* outputs;       // of the 3x3 layers
    const float* const* weights;  // turned: places of a tile, blocks of columns, inputs, columns; then the 1x1 one
    const float* const* biases;
};

constexpr int TILE_SIDE = 4, SIDE = TILE_SIDE + 2, PLACES = SIDE * SIDE;

// Polynomials of degree 2 and 3 are multiplied by their values at 0, A, -A, B, -B and at infinity. These points are closer
// together than the usual 1 and 2, and make errors half as large.
constexpr float A = 0.75f, B = 1.5f, A2 = A * A, B2 = B * B;

inline void turn_in(const V* d, V* to) {
    V even = d[4] - B2 * d[2], odd = A * (d[3] - B2 * d[1]);
    V other_even = d[4] - A2 * d[2], other_odd = B * (d[3] - A2 * d[1]);
    to[0] = other_even - B2 * (d[2] - A2 * d[0]);
    to[1] = even + odd, to[2] = even - odd, to[3] = other_even + other_odd, to[4] = other_even - other_odd;
    to[5] = d[5] - B2 * d[3] - A2 * (d[3] - B2 * d[1]);
}

inline void turn_back(const V* m, V* to) {
    V even = m[1] + m[2], odd = A * (m[1] - m[2]), other_even = m[3] + m[4], other_odd = B * (m[3] - m[4]);
    to[0] = m[0] + even + other_even, to[1] = odd + other_odd;
    to[2] = A2 * even + B2 * other_even, to[3] = A2 * odd + B2 * other_odd + m[5];
}

inline V silu(V x) { return x * reciprocal(1 + exponential(-x)); }

struct Values {
    static constexpr int M = TILE_SIDE;
    const Call& call;
    const int height, width, channels, depth, down, along;  // down, along: tiles
    const Frame frame;
    const int pitch;  // of tiles; an odd number of blocks, so that planes do not share their cache sets
    std::vector<int> words;          // how many channels are in each plane of what enters the 3x3 layers
    std::vector<int> starts = {0};   // planes of each group, x first
    std::vector<int> columns = {0};  // channels
    int most_planes = 0, most_blocks = 0;

    explicit Values(const Call& call)
        : call(call), height(call.height), width(call.width), channels(call.channels), depth(call.depth),
          down((height + M - 1) / M), along((width + M - 1) / M), frame{down * M, along * M},
          pitch(PIXELS * (up(call.together * down * along, PIXELS) / PIXELS | 1)) {
        for (int g = 0; g <= depth; ++g) {
            const int count = g ? call.outputs[g - 1] : channels;
            for (int side = 0; side < sides(g); ++side)
                for (int c = 0; c < count; c += LANES) words.push_back(std::min(LANES, count - c));
            starts.push_back(words.size()), columns.push_back(columns.back() + sides(g) * count);
            most_planes = std::max(most_planes, starts[g + 1] - starts[g]);
            if (g) most_blocks = std::max(most_blocks, up(count, COLUMNS) / COLUMNS);
        }
    }

    int sides(int g) const { return 1 + (call.mirrored && (g || call.enters)); }
    // A vector of group g's features, from what goes through silu.
    void put(int g, V q, float* to) const {
        const V value = silu(q);
        store(to, value);
        if (sides(g) == 2) store(to + (starts[g + 1] - starts[g]) / 2 * frame.plane(), value - q);
    }
    int wide() const { return up(channels, LANES); }
    long turned_plane() const { return (long)pitch * LANES; }
    long turned() const { return PLACES * starts[depth] * turned_plane(); }
    long turned_block() const { return (long)pitch * COLUMNS; }
    long made() const { return PLACES * most_blocks * turned_block(); }
    long sums() const { return (long)height * width * wide(); }
    long space() const {  // in whole vectors
        return (turned() + made() + most_planes * frame.plane() + call.together * sums() + LANES - 1) / LANES * LANES;
    }

    // From images to g(x), `count` of them at a time.
    void images(const float* x, int count, float* space, float* out) const {
        float *tiles = space, *products = tiles + turned(), *planes = products + made();
        float* total = planes + most_planes * frame.plane();
        std::fill_n(planes, most_planes * frame.plane(), 0.0f);
        for (int g = 0; g <= depth; ++g) {
            if (g) multiply(g - 1, tiles, count * down * along, products);
            for (int i = 0; i < count; ++i) {
                const int first = i * down * along;
                if (g)
                    leave(g - 1, products, first, planes);
                else
                    enter(x + (long)i * height * width * channels, planes);
                add_last(g, planes, total + i * sums());
                if (g < depth) turn(g, planes, first, tiles);
            }
        }
        for (int i = 0; i < count; ++i)
            for (long p = 0; p < (long)height * width; ++p, out += channels)
                std::copy_n(total + i * sums() + p * wide(), channels, out);
    }

    void enter(const float* x, float* planes) const {
        for (int y = 0; y < height; ++y)
            for (int at = 0; at < width; ++at, x += channels)
                for (int c = 0; c < channels; c += LANES) {
                    alignas(64) float pixel[LANES] = {};
                    std::copy_n(x + c, std::min(LANES, channels - c), pixel);
                    float* to = planes + c / LANES * frame.plane() + frame.at(y, at);
                    if (call.enters)
                        put(0, call.scale * load(pixel), to);
                    else
                        store(to, load(pixel));
                }
    }

    // Tiles of group g, with the pixels around them.
    void turn(int g, const float* planes, int first, float* tiles) const {
        for (int p = starts[g]; p < starts[g + 1]; ++p, planes += frame.plane())
            for (int t = 0; t < down * along; ++t) {
                const float* from = planes + frame.at(t / along * M - 1, t % along * M - 1);
                V in[SIDE][SIDE], half[SIDE][SIDE], column[SIDE], out[SIDE];
#pragma GCC unroll 6
                for (int y = 0; y < SIDE; ++y) {
#pragma GCC unroll 6
                    for (int x = 0; x < SIDE; ++x) in[y][x] = load(from + y * frame.down() + x * LANES);
                    turn_in(in[y], half[y]);
                }
                float* to = tiles + p * turned_plane() + (long)(first + t) * LANES;
#pragma GCC unroll 6
                for (int x = 0; x < SIDE; ++x) {
#pragma GCC unroll 6
                    for (int y = 0; y < SIDE; ++y) column[y] = half[y][x];
                    turn_in(column, out);
#pragma GCC unroll 6
                    for (int y = 0; y < SIDE; ++y) store(to + (y * SIDE + x) * starts[depth] * turned_plane(), out[y]);
                }
            }
    }

    // Of a layer's columns, two vectors at a time; the last one may be alone.
    int columns_of(int l, int block) const { return std::min(COLUMNS, up(call.outputs[l], LANES) - block * COLUMNS); }

    void multiply(int l, const float* tiles, int count, float* products) const {
        const long inputs = columns[l + 1], size = inputs * up(call.outputs[l], LANES);
        std::vector<Stretch> stretches;
        for (int p = 0; p < starts[l + 1]; ++p) stretches.push_back({p * turned_plane(), words[p]});
        for (int place = 0; place < PLACES; ++place)
            for (int block = 0; block * COLUMNS < call.outputs[l]; ++block) {
                const float* from = tiles + place * starts[depth] * turned_plane();
                const float* weight = call.weights[l] + place * size + block * inputs * COLUMNS;
                float* to = products + (place * most_blocks + block) * turned_block();
                in_blocks(count, [&](auto rows, int t) {
                    constexpr int R = rows;
                    if (columns_of(l, block) == COLUMNS)
                        convolve<Full, R, VECTORS>(from + t * LANES, stretches, weight, to + t * COLUMNS);
                    else
                        convolve<Full, R, 1>(from + t * LANES, stretches, weight, to + t * LANES);
                });
            }
    }

    // What layer l adds to one image.
    void leave(int l, const float* products, int first, float* planes) const {
        for (int c = 0; c < call.outputs[l]; c += LANES, planes += frame.plane()) {
            const V bias = load(call.biases[l] + c);
            const int block = c / COLUMNS, wide = columns_of(l, block);
            const float* from = products + block * turned_block() + first * wide + c % COLUMNS;
            for (int t = 0; t < down * along; ++t, from += wide) {
                V in[SIDE], half[SIDE][M], column[SIDE], out[M][M];
#pragma GCC unroll 6
                for (int y = 0; y < SIDE; ++y) {
#pragma GCC unroll 6
                    for (int x = 0; x < SIDE; ++x) in[x] = load(from + (y * SIDE + x) * most_blocks * turned_block());
                    turn_back(in, half[y]);
                }
                const int top = t / along * M, left = t % along * M;
#pragma GCC unroll 4
                for (int x = 0; x < M; ++x) {
#pragma GCC unroll 6
                    for (int y = 0; y < SIDE; ++y) column[y] = half[y][x];
                    turn_back(column, out[x]);
                }
                for (int y = 0; y < std::min(M, height - top); ++y)
                    for (int x = 0; x < std::min(M, width - left); ++x)
                        put(l + 1, out[x][y] + bias, planes + frame.at(top + y, left + x));
            }
        }
    }

    // What the last layer makes of group g.
    void add_last(int g, const float* planes, float* total) const {
        std::vector<Stretch> stretches;
        for (int p = starts[g]; p < starts[g + 1]; ++p) stretches.push_back({(p - starts[g]) * frame.plane(), words[p]});
        for (int y = 0; y < height; ++y)
            for (int c = 0; c < channels; c += LANES) {
                const float* weight = call.weights[depth] + ((long)c * columns[depth + 1] + columns[g] * LANES);
                in_blocks(width, [&](auto pixels, int x) {
                    constexpr int P = pixels;
                    alignas(64) float found[P * LANES];
                    convolve<Full, P, 1>(planes + frame.at(y, x), stretches, weight, found);
                    float* to = total + ((long)y * width + x) * wide() + c;
                    for (int i = 0; i < P; ++i, to += wide())
                        store(to, load(found + i * LANES) + (g ? load(to) : load(call.biases[depth] + c)));
                });
            }
    }
};

}  // namespace

extern "C" {

int values_lanes() { return LANES; }
int values_columns() { return COLUMNS; }

// Floats that each thread works in.
int64_t values_space(const Call* call) { return Values(*call).space(); }

void values(const Call* call, const float* x, float* space, float* out) {
    const Values values(*call);
    const long size = (long)call->height * call->width * call->channels, own = values.space();
    const int parts = (call->images + call->together - 1) / call->together;
#pragma omp parallel for num_threads(call->threads) schedule(static, 1)
    for (int slot = 0; slot < call->threads; ++slot)
        for (int part = slot; part < parts; part += call->threads) {
            const long first = (long)part * call->together;
            const int count = std::min<long>(call->together, call->images - first);
            values.images(x + first * size, count, space + slot * own, out + first * size);
        }
}
}
