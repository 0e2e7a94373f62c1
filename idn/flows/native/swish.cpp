// LipSwish between two products, out = r phi(a y + b): y is what the product before made, b has a number per channel,
// and r and a are numbers of the layer. A mirrored one, CLipSwish, is r [phi(x); phi(-x)] of x = a y + b.
//
// Rows are pixels, or points of a vector flow, with their channels side by side: first the points, then one or more
// groups with a tangent of each point. Their derivative is d out / d y = k phi'(x) with k = r a: the `slope`.
// Numbers are fp32 or bf16 in memory and fp32 in between.
//
// Where a dense branch ends in a map of each pixel to few channels, that map's share is taken here, while a feature is
// at hand: its product on the way forward, what it gives back, and the gradient of its weight.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

#define INLINE __attribute__((always_inline))

namespace {

constexpr int LANES = 16;
constexpr int64_t CHUNK = 128;  // rows whose sums are taken together: the result does not depend on the threads
constexpr int64_t PARALLEL = 1 << 15;  // numbers below which one thread is quicker

typedef float Vec __attribute__((vector_size(LANES * 4)));
typedef uint32_t Bits __attribute__((vector_size(LANES * 4)));
typedef uint16_t Halves __attribute__((vector_size(LANES * 2)));

inline Vec load(const float* from, int lanes) {
  Vec x{};
  std::memcpy(&x, from, 4 * lanes);
  return x;
}

inline Vec load(const uint16_t* from, int lanes) {
  Halves half{};
  std::memcpy(&half, from, 2 * lanes);
  return (Vec)(__builtin_convertvector(half, Bits) << 16);
}

inline void store(float* to, Vec x, int lanes) { std::memcpy(to, &x, 4 * lanes); }

inline void store(uint16_t* to, Vec x, int lanes) {
#ifdef __AVX512BF16__
  auto half = _mm512_cvtneps_pbh((__m512)x);
#else
  Bits bits = (Bits)x;
  Halves half = __builtin_convertvector((bits + 0x7fff + ((bits >> 16) & 1)) >> 16, Halves);  // to the nearest, or even
#endif
  std::memcpy(to, &half, 2 * lanes);
}

inline float read(float x) { return x; }

inline float read(uint16_t x) {
  uint32_t bits = (uint32_t)x << 16;
  float wide;
  std::memcpy(&wide, &bits, 4);
  return wide;
}

// exp(x) for |x| <= 87, to 2e-7: 2^n exp(rest), where n appears in the last bits of a number that large.
inline Vec exponential(Vec x) {
  const float large = 12582912.f;
  x = x > 87.f ? Vec{} + 87.f : x < -87.f ? Vec{} - 87.f : x;
  Vec shifted = x * 1.44269504f + large;
  Vec n = shifted - large;
  Vec rest = x - n * 0.693359375f + n * 2.12194440e-4f;
  Vec tail = ((((rest * (1 / 720.f) + 1 / 120.f) * rest + 1 / 24.f) * rest + 1 / 6.f) * rest + .5f) * rest * rest;
  return (1 + (rest + tail)) * (Vec)(((Bits)shifted << 23) + (127u << 23));
}

// Calls body(channel, lanes, known) for every vector of channels. The last one overlaps the one before, if there is
// one: what it makes of its first `known` channels is there already, and not to be summed again.
template <class Body>
inline void over_channels(int channels, Body body) {
  int c = 0;
  for (; c + LANES <= channels; c += LANES) body(c, LANES, 0);
  if (c == channels) return;
  if (channels >= LANES)
    body(channels - LANES, LANES, c - (channels - LANES));
  else
    body(0, channels, 0);
}

inline Vec without(Vec x, int known) {
  const Bits lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return lane < (uint32_t)known ? Vec{} : x;
}

inline float total(Vec x) {
  typedef float Half __attribute__((vector_size(32)));
  typedef float Quarter __attribute__((vector_size(16)));
  Half low, high;
  std::memcpy(&low, &x, 32);
  std::memcpy(&high, (const char*)&x + 32, 32);
  low += high;
  Quarter first, second;
  std::memcpy(&first, &low, 16);
  std::memcpy(&second, (const char*)&low + 16, 16);
  first += second;
  return (first[0] + first[1]) + (first[2] + first[3]);
}

template <class T>
struct Slices {  // the same channels of several batches
  int count;
  T* const* starts;
  const int64_t* strides;  // from row to row

  T* at(int i, int64_t row) const { return starts[i] + row * strides[i]; }

  Vec sum(int64_t row, int channel, int lanes) const {
    Vec x{};
    for (int i = 0; i < count; i++) x += load(at(i, row) + channel, lanes);
    return x;
  }

  void write(int64_t row, int channel, Vec x, int lanes) const {
    for (int i = 0; i < count; i++) store(at(i, row) + channel, x, lanes);
  }
};

constexpr int MOST = 4;  // channels that an ending makes

template <class T>
struct Ending {
  int count;  // none: there is no such map
  const T* weight;  // of the features that the layer makes
  int64_t stride;

  void add(Vec* sums, int channel, Vec x, int lanes) const {
    for (int k = 0; k < count; k++) sums[k] += load(weight + k * stride + channel, lanes) * x;
  }
  void finish(float* out, const Vec* sums) const {
    for (int k = 0; k < count; k++) out[k] += total(sums[k]);
  }
  Vec transposed(const T* u, int channel, int lanes) const {
    Vec x{};
    for (int k = 0; k < count; k++) x += read(u[k]) * load(weight + k * stride + channel, lanes);
    return x;
  }
};

struct Layer {
  int64_t points;
  int tangents, channels, threads;
  const float* bias;  // may be missing
  float beta, divisor, before, after;

  template <class T>
  Vec entering(const T* y, int64_t row, int c, int lanes) const {
    Vec x = before * load(y + row * channels + c, lanes);
    return bias ? x + load(bias + c, lanes) : x;
  }
  int64_t rows() const { return points * (1 + tangents); }
  bool parallel() const { return threads > 1 && rows() * channels > PARALLEL; }
};

// With q = beta x and s = sigmoid(q):  phi = x s / c,  phi' = (s + q s (1 - s)) / c,  and both phi'' = beta e and
// d phi' / d beta = x e share e = s (1 - s) (2 + q (1 - 2 s)) / c.
struct Gate {
  Vec s, rest;  // s and 1 - s

  explicit Gate(Vec q) {
    Vec e = exponential(-q);
    s = 1 / (1 + e);
    rest = e * s;
  }
  Gate(Vec s, Vec rest) : s(s), rest(rest) {}
  Gate mirrored() const { return Gate(rest, s); }
  Vec slope(Vec q) const { return s + q * s * rest; }
  Vec bend(Vec q) const { return s * rest * (2 + q * (rest - s)); }
};

void add_chunks(const std::vector<float>& sums, int64_t count, float* out) {
  std::fill(out, out + count, 0.f);
  for (size_t start = 0; start < sums.size(); start += count)
    for (int64_t i = 0; i < count; i++) out[i] += sums[start + i];
}

template <class T, bool mirror>
void forward(const Layer& layer, const T* y, T* slopes, const Slices<T>& out, const Ending<T>& end, float* ends) {
  const int channels = layer.channels, width = mirror ? 2 * channels : channels;
  const float value = layer.after / layer.divisor, steep = value * layer.before;
#pragma omp parallel num_threads(layer.threads) if (layer.parallel())
  {
    std::vector<float> slope(width);
#pragma omp for
    for (int64_t p = 0; p < layer.points; p++) {
      Vec sums[MOST] = {};
      over_channels(channels, [&](int c, int lanes, int known) INLINE {
        Vec x = layer.entering(y, p, c, lanes), q = layer.beta * x;
        Gate gate(q);
        auto make = [&](int c, Vec feature, Vec derivative) INLINE {
          out.write(p, c, feature, lanes);
          end.add(sums, c, without(feature, known), lanes);
          store(&slope[c], derivative, lanes);
          if (slopes) store(slopes + p * width + c, derivative, lanes);
        };
        make(c, value * x * gate.s, steep * gate.slope(q));
        if (mirror) make(channels + c, -value * x * gate.rest, -steep * gate.mirrored().slope(-q));
      });
      end.finish(ends + p * end.count, sums);
      for (int64_t row = p + layer.points; row < layer.rows(); row += layer.points) {
        Vec sums[MOST] = {};
        over_channels(channels, [&](int c, int lanes, int known) INLINE {
          Vec tangent = load(y + row * channels + c, lanes);
          auto make = [&](int c) INLINE {
            Vec feature = load(&slope[c], lanes) * tangent;
            out.write(row, c, feature, lanes);
            end.add(sums, c, without(feature, known), lanes);
          };
          make(c);
          if (mirror) make(channels + c);
        });
        end.finish(ends + row * end.count, sums);
      }
    }
  }
}

// Of the sum of the slices, and of what the ending gives back of u, to y.
template <class T, bool mirror>
void pull(const Layer& layer, const T* slopes, const Slices<T>& from, const Ending<T>& end, const T* u, T* into) {
  const int channels = layer.channels, width = mirror ? 2 * channels : channels;
#pragma omp parallel for num_threads(layer.threads) if (layer.parallel())
  for (int64_t row = 0; row < layer.rows(); row++) {
    const T* slope = slopes + row % layer.points * width;
    over_channels(channels, [&](int c, int lanes, int) INLINE {
      auto pulled = [&](int c) INLINE {
        return load(slope + c, lanes) * (from.sum(row, c, lanes) + end.transposed(u + row * end.count, c, lanes));
      };
      Vec x = pulled(c);
      if (mirror) x += pulled(channels + c);
      store(into + row * channels + c, x, lanes);
    });
  }
}

// Gradients of y, of the bias (where it is asked for), of beta and of the ending's weight, from those of what went out.
template <class T, bool mirror>
void back(const Layer& layer, const T* y, const Slices<T>& grad, const Ending<T>& end, const T* u, T* into,
          float* into_bias, float* into_beta, float* into_end) {
  const int channels = layer.channels, width = mirror ? 2 * channels : channels;
  const float value = layer.after / layer.divisor, steep = value * layer.before;
  const int64_t chunks = (layer.points + CHUNK - 1) / CHUNK, ends = end.count * width;
  std::vector<float> biases(into_bias ? chunks * channels : 0), weights(chunks * ends);
  std::vector<double> betas(chunks);
#pragma omp parallel for num_threads(layer.threads) if (layer.parallel())
  for (int64_t chunk = 0; chunk < chunks; chunk++)
    for (int64_t p = chunk * CHUNK; p < std::min(layer.points, (chunk + 1) * CHUNK); p++) {
      Vec beta{};
      over_channels(channels, [&](int c, int lanes, int known) INLINE {
        auto gradient = [&](int64_t row, int c) INLINE {
          return grad.sum(row, c, lanes) + end.transposed(u + row * end.count, c, lanes);
        };
        auto into_ending = [&](int64_t row, int c, Vec feature) INLINE {
          for (int k = 0; k < end.count; k++) {
            float* sum = &weights[chunk * ends + k * width + c];
            store(sum, load(sum, lanes) + read(u[row * end.count + k]) * without(feature, known), lanes);
          }
        };
        Vec x = layer.entering(y, p, c, lanes), q = layer.beta * x;
        Gate gate(q);
        Vec up = gradient(p, c), slope = steep * gate.slope(q);
        Vec down{}, falling{}, through{};  // the mirrored half; gradient of phi' times e
        into_ending(p, c, value * x * gate.s);
        if (mirror) {
          down = gradient(p, channels + c), falling = -steep * gate.mirrored().slope(-q);
          into_ending(p, channels + c, -value * x * gate.rest);
        }
        for (int64_t row = p + layer.points; row < layer.rows(); row += layer.points) {
          Vec tangent = load(y + row * channels + c, lanes), either = gradient(row, c);
          Vec result = slope * either;
          into_ending(row, c, slope * tangent);
          if (mirror) {
            Vec other = gradient(row, channels + c);
            result += falling * other;
            either += other;  // -phi'(-x) bends as phi'(x) does: e is even
            into_ending(row, channels + c, falling * tangent);
          }
          through += either * tangent;
          store(into + row * channels + c, result, lanes);
        }
        through *= steep * gate.bend(q);
        Vec result = slope * up + (layer.beta * layer.before) * through;
        if (mirror) result += falling * down;
        store(into + p * channels + c, result, lanes);
        beta += without(value * (up + down) * x * x * gate.s * gate.rest + x * through, known);
        if (into_bias) {
          float* sum = &biases[chunk * channels + c];
          store(sum, load(sum, lanes) + without(result, known), lanes);
        }
      });
      betas[chunk] += total(beta);
    }
  if (into_bias) {
    add_chunks(biases, channels, into_bias);
    for (int c = 0; c < channels; c++) into_bias[c] /= layer.before;
  }
  add_chunks(weights, ends, into_end);
  double sum = 0;
  for (double one : betas) sum += one;
  *into_beta = sum;
}

template <class T>
void channel_sums(int64_t rows, int channels, int threads, const T* x, float* out) {
  const int64_t chunks = (rows + CHUNK - 1) / CHUNK;
  std::vector<float> sums(chunks * channels);
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows * channels > PARALLEL)
  for (int64_t chunk = 0; chunk < chunks; chunk++)
    for (int64_t row = chunk * CHUNK; row < std::min(rows, (chunk + 1) * CHUNK); row++)
      over_channels(channels, [&](int c, int lanes, int known) INLINE {
        float* sum = &sums[chunk * channels + c];
        store(sum, load(sum, lanes) + without(load(x + row * channels + c, lanes), known), lanes);
      });
  add_chunks(sums, channels, out);
}

// The slices' sum times a number, with what is in `first`.
template <class T>
void gather(int64_t rows, int channels, const Slices<T>& from, float number, const T* first, float* out) {
  const int64_t ahead = 16;  // the few channels of a row lie far apart: without asking, each would be waited for
  for (int64_t row = 0; row < rows; row++) {
    for (int i = 0; i < from.count; i++) __builtin_prefetch(from.at(i, std::min(row + ahead, rows - 1)));
    for (int c = 0; c < channels; c++) {
      float sum = 0;
      for (int i = 0; i < from.count; i++) sum += read(from.at(i, row)[c]);
      out[row * channels + c] = read(first[row * channels + c]) + number * sum;
    }
  }
}

template <class Call>
void typed(bool low, bool mirror, Call call) {
  if (low)
    mirror ? call(uint16_t{}, std::true_type{}) : call(uint16_t{}, std::false_type{});
  else
    mirror ? call(float{}, std::true_type{}) : call(float{}, std::false_type{});
}

struct Around {  // as `swish.py` passes it
  int32_t low, mirror, threads, tangents, channels, count, ends;
  int64_t points, end_stride;
  const float *bias, *beta, *before, *after;
  const void* end;
  void* const* slices;
  const int64_t* strides;
  float divisor;

  Layer layer() const {
    return {points, tangents, channels, threads, bias, *beta, divisor, before ? *before : 1, after ? *after : 1};
  }
  template <class T>
  Slices<T> sliced() const {
    return {count, (T* const*)slices, strides};
  }
  template <class T>
  Ending<T> ending() const {
    return {ends, (const T*)end, end_stride};
  }
};

}  // namespace

extern "C" {

void swish_forward(const Around* f, const void* y, void* slopes, float* ends) {
  typed(f->low, f->mirror, [&](auto type, auto mirror) {
    using T = decltype(type);
    forward<T, mirror.value>(f->layer(), (const T*)y, (T*)slopes, f->sliced<T>(), f->ending<T>(), ends);
  });
}

void swish_pull(const Around* f, const void* slopes, const void* u, void* into) {
  typed(f->low, f->mirror, [&](auto type, auto mirror) {
    using T = decltype(type);
    pull<T, mirror.value>(f->layer(), (const T*)slopes, f->sliced<T>(), f->ending<T>(), (const T*)u, (T*)into);
  });
}

void swish_back(const Around* f, const void* y, const void* u, void* into, float* into_bias, float* into_beta,
                float* into_end) {
  typed(f->low, f->mirror, [&](auto type, auto mirror) {
    using T = decltype(type);
    back<T, mirror.value>(f->layer(), (const T*)y, f->sliced<T>(), f->ending<T>(), (const T*)u, (T*)into, into_bias,
                          into_beta, into_end);
  });
}

void gather_channels(int low, int64_t rows, int channels, int count, void* const* from, const int64_t* strides,
                     const float* number, const void* first, float* out) {
  if (low)
    gather(rows, channels, Slices<uint16_t>{count, (uint16_t* const*)from, strides}, *number, (const uint16_t*)first,
           out);
  else
    gather(rows, channels, Slices<float>{count, (float* const*)from, strides}, *number, (const float*)first, out);
}

void sums_of_channels(int low, int64_t rows, int channels, int threads, const void* x, float* out) {
  if (low)
    channel_sums(rows, channels, threads, (const uint16_t*)x, out);
  else
    channel_sums(rows, channels, threads, (const float*)x, out);
}
}
