// Products with 4-bit weights on x86 CPUs with AVX-512, and one decode step of a llama model as one call.
//
// A product of many rows runs on AMX where the processor has it. A 4-bit weight is scale * nibble + minimum, and a nibble is
// exact in bfloat16: tiles multiply nibbles with activations that are split into two bfloat16 halves (16 bits of precision),
// and scales and minimums are applied in float32, a block of 32 columns at a time. Nothing is rounded to bfloat16 on the way.
//
// In a decode step every row computes one token. PyTorch needs some fifteen operators a layer for that, and at one row their overhead costs as much as reading the
// weights. Here a team of threads walks the layers together, phase by phase. Activations are float32, 4-bit and 8-bit
// weights are expanded in registers with their own scales, and sums run in an order that does not depend on the number of
// rows: a row's result is the same to the bit in every batch.
//
// Plain C interface, called through ctypes (native.py owns the memory and says what each array holds).

#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <exception>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

#define AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,f16c,fma")))

#define AMX __attribute__((target("amx-tile,amx-bf16,avx512f,avx512bw,avx512vl,avx512dq,f16c,fma")))

namespace {

constexpr int kLanes = 16;     // rows of a weight tile, one a lane
constexpr int kBlock = 32;     // weights that share a scale
constexpr int kRowGroup = 4;   // activation rows that share one expansion of a tile
constexpr int kAhead = 4096;     // bytes that are asked of memory ahead of their use; past the end of a matrix they are not read
constexpr int kCachedActivations = 640 << 10;  // bytes of split activations that fit into a core's second-level cache beside the rest
constexpr int kQ4Bytes = 320;  // a block of a Q4 tile: 4 x 16 dwords of nibbles, 16 scales, 16 minimums (float16)
constexpr int kQ8Bytes = 544;  // a block of a Q8 tile: 8 x 16 dwords of int8, 16 scales (float16)

// Waits for a condition that another thread is about to make true: spins for a moment, then gives its core away.
template <typename Condition>
void wait_for(Condition condition) {
  for (int spins = 0; !condition(); ++spins) {
    if (spins < 4000) _mm_pause();
    else std::this_thread::yield();
  }
}

// Threads that help the caller with one function, again and again. Nobody waits for a helper that has not begun: on a busy
// machine the caller does the work alone rather than wait for a core.
class Team {
 public:
  // Where the system gives fewer than `size - 1` threads, the team is smaller.
  explicit Team(int size) {
    threads_.reserve(size - 1);
    try {
      for (int index = 1; index < size; ++index) threads_.emplace_back([this, index] { help(index); });
    } catch (const std::exception&) {  // a thread that runs must not be left without its Team
    }
  }

  ~Team() {
    {
      std::lock_guard lock(mutex_);
      stop_ = true;
      generation_.fetch_add(1);
    }
    generation_.notify_all();
    for (auto& thread : threads_) thread.join();
  }

  int size() const { return static_cast<int>(threads_.size()) + 1; }

  // Calls job(argument, thread index) here and on the helpers that come in time; returns when none of them is in it. The job
  // must not throw: on a helper nobody would catch it.
  void run(void (*job)(void*, int), void* argument) {
    {
      std::lock_guard lock(mutex_);
      job_ = job;
      argument_ = argument;
      generation_.fetch_add(1);
    }
    generation_.notify_all();
    job(argument, 0);
    {
      std::lock_guard lock(mutex_);
      job_ = nullptr;
    }
    wait_for([this] { return inside_.load(std::memory_order_acquire) == 0; });
  }

 private:
  void help(int index) {
    uint32_t seen = 0;
    for (;;) {
      for (int spins = 0; spins < 3000 && generation_.load(std::memory_order_acquire) == seen; ++spins) _mm_pause();
      generation_.wait(seen, std::memory_order_acquire);
      void (*job)(void*, int);
      void* argument;
      {
        std::lock_guard lock(mutex_);
        if (stop_) return;
        seen = generation_.load();
        job = job_;
        argument = argument_;
        if (job) inside_.fetch_add(1);
      }
      if (!job) continue;  // it was done before this helper came
      job(argument, index);
      inside_.fetch_sub(1, std::memory_order_release);
    }
  }

  std::vector<std::thread> threads_;
  std::mutex mutex_;
  void (*job_)(void*, int) = nullptr;  // guarded by mutex_, as the next two
  void* argument_ = nullptr;
  bool stop_ = false;
  alignas(64) std::atomic<uint32_t> generation_{0};
  alignas(64) std::atomic<int> inside_{0};
};

// Work that a team shares, phase by phase.
struct Phases {
  std::vector<std::atomic<int>> taken, done;  // a phase: pieces of work that somebody has begun, and has ended

  explicit Phases(size_t count) : taken(count), done(count) {}

  // One phase: each(index) for all of [0, count), handed out in pieces to whichever thread comes first. `prepare` runs once on
  // each thread that gets some, after it has got it: the phase can't end before that piece is done, so what the phase's end
  // sets free to be changed may be read. Returns when every piece is done.
  template <typename Prepare, typename Each>
  void share(int team_size, int phase, int count, Prepare prepare, Each each) {
    const int piece = std::max(1, count / (team_size * 8));
    bool is_prepared = false;
    for (int first; (first = taken[phase].fetch_add(piece, std::memory_order_acq_rel)) < count;) {
      if (!is_prepared) prepare();
      is_prepared = true;
      const int last = std::min(first + piece, count);
      for (int index = first; index < last; ++index) each(index);
      done[phase].fetch_add(last - first, std::memory_order_release);
    }
    wait_for([&] { return done[phase].load(std::memory_order_acquire) == count; });
  }
};

// Activation rows with the sum of each block of 32, which the minimum of a 4-bit block multiplies.
struct Rows {
  std::vector<float> values;  // [rows, cols]
  std::vector<float> sums;    // [rows, cols / 32]
};

AVX512 inline __m512 exp512(__m512 x) {
  // 2^n * 2^f with n whole and f in [-1/2, 1/2]; the polynomial is the Taylor series of 2^f to the sixth power.
  const __m512 y = _mm512_mul_ps(_mm512_max_ps(x, _mm512_set1_ps(-126.0f)), _mm512_set1_ps(1.44269504088896341f));
  const __m512 whole = _mm512_roundscale_ps(y, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 f = _mm512_sub_ps(y, whole);
  __m512 p = _mm512_set1_ps(1.54035304e-4f);
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.33335581e-3f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(9.61812911e-3f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(5.55041087e-2f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(2.40226507e-1f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(6.93147181e-1f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f));
  return _mm512_scalef_ps(p, whole);
}

AVX512 inline __m512 load_half(const uint8_t* source) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(source)));
}

AVX512 inline __m512 load_half(const uint16_t* source) { return load_half(reinterpret_cast<const uint8_t*>(source)); }

AVX512 inline void store_half(uint16_t* target, const float* source) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(target), _mm512_cvtps_ph(_mm512_loadu_ps(source), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

AVX512 void sum_blocks(const float* values, int rows, int cols, float* sums) {
  const size_t blocks = static_cast<size_t>(rows) * cols / kBlock;
  for (size_t block = 0; block < blocks; ++block) {
    const float* at = values + block * kBlock;
    sums[block] = _mm512_reduce_add_ps(_mm512_add_ps(_mm512_loadu_ps(at), _mm512_loadu_ps(at + 16)));
  }
}

// y = x / sqrt(mean(x^2) + eps) * weight, and its block sums.
AVX512 void rms_norm(const float* x, const float* weight, float eps, int rows, int cols, Rows& out) {
  for (int row = 0; row < rows; ++row) {
    const float* source = x + static_cast<size_t>(row) * cols;
    float* target = out.values.data() + static_cast<size_t>(row) * cols;
    __m512 squares = _mm512_setzero_ps();
    for (int k = 0; k < cols; k += 16) {
      const __m512 value = _mm512_loadu_ps(source + k);
      squares = _mm512_fmadd_ps(value, value, squares);
    }
    const __m512 scale = _mm512_set1_ps(1.0f / std::sqrt(_mm512_reduce_add_ps(squares) / cols + eps));
    for (int k = 0; k < cols; k += 16) {
      _mm512_storeu_ps(target + k, _mm512_mul_ps(_mm512_mul_ps(_mm512_loadu_ps(source + k), scale), _mm512_loadu_ps(weight + k)));
    }
  }
  sum_blocks(out.values.data(), rows, cols, out.sums.data());
}

// 16 outputs of N rows: one Q4 tile times x. Four partial sums a row hide the latency of the additions.
template <int N>
AVX512 void q4_tile(const uint8_t* tile, const float* x, const float* sums, int cols, __m512* out) {
  const __m512 digits = _mm512_set_ps(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  const int blocks = cols / kBlock;
  for (int n = 0; n < N; ++n) out[n] = _mm512_setzero_ps();
  for (int block = 0; block < blocks; ++block, tile += kQ4Bytes) {
    __m512 part[N][4];
    for (int n = 0; n < N; ++n)
      for (int j = 0; j < 4; ++j) part[n][j] = _mm512_setzero_ps();
    for (int line = 0; line < kQ4Bytes; line += 64) _mm_prefetch(reinterpret_cast<const char*>(tile + kAhead + line), _MM_HINT_T0);
    for (int group = 0; group < 4; ++group) {
      const __m512i nibbles = _mm512_loadu_si512(tile + group * 64);
      const float* at = x + block * kBlock + group * 8;
#pragma GCC unroll 8
      for (int j = 0; j < 8; ++j) {
        const __m512 weight = _mm512_permutexvar_ps(_mm512_srli_epi32(nibbles, 4 * j), digits);  // the index is the low 4 bits
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) part[n][j & 3] = _mm512_fmadd_ps(weight, _mm512_set1_ps(at[static_cast<size_t>(n) * cols + j]), part[n][j & 3]);
      }
    }
    const __m512 scale = load_half(tile + 256), minimum = load_half(tile + 288);
    for (int n = 0; n < N; ++n) {
      const __m512 sum = _mm512_add_ps(_mm512_add_ps(part[n][0], part[n][1]), _mm512_add_ps(part[n][2], part[n][3]));
      out[n] = _mm512_fmadd_ps(scale, sum, out[n]);
      out[n] = _mm512_fmadd_ps(minimum, _mm512_set1_ps(sums[static_cast<size_t>(n) * blocks + block]), out[n]);
    }
  }
}

template <int N>
AVX512 void q8_tile(const uint8_t* tile, const float* x, const float*, int cols, __m512* out) {
  for (int n = 0; n < N; ++n) out[n] = _mm512_setzero_ps();
  for (int block = 0; block < cols / kBlock; ++block, tile += kQ8Bytes) {
    __m512 part[N][4];
    for (int n = 0; n < N; ++n)
      for (int j = 0; j < 4; ++j) part[n][j] = _mm512_setzero_ps();
    for (int line = 0; line < kQ8Bytes; line += 64) _mm_prefetch(reinterpret_cast<const char*>(tile + kAhead + line), _MM_HINT_T0);
    for (int group = 0; group < 8; ++group) {
      const __m512i bytes = _mm512_loadu_si512(tile + group * 64);
      const float* at = x + block * kBlock + group * 4;
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        const __m512 weight = _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(bytes, 24 - 8 * j), 24));
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) part[n][j] = _mm512_fmadd_ps(weight, _mm512_set1_ps(at[static_cast<size_t>(n) * cols + j]), part[n][j]);
      }
    }
    const __m512 scale = load_half(tile + 512);
    for (int n = 0; n < N; ++n)
      out[n] = _mm512_fmadd_ps(scale, _mm512_add_ps(_mm512_add_ps(part[n][0], part[n][1]), _mm512_add_ps(part[n][2], part[n][3])), out[n]);
  }
}

using Tile = void (*)(const uint8_t*, const float*, const float*, int, __m512*);
constexpr Tile kQ4Tiles[] = {q4_tile<1>, q4_tile<2>, q4_tile<3>, q4_tile<4>};
constexpr Tile kQ8Tiles[] = {q8_tile<1>, q8_tile<2>, q8_tile<3>, q8_tile<4>};

// Calls store(row, 16 outputs) for every row of x, in groups that share the expansion of the tile.
template <typename Store>
AVX512 void tile_rows(const Tile* kernels, const uint8_t* tile, const float* x, const float* sums, int rows, int cols, Store store) {
  for (int first = 0; first < rows; first += kRowGroup) {
    const int count = std::min(kRowGroup, rows - first);
    __m512 out[kRowGroup];
    kernels[count - 1](tile, x + static_cast<size_t>(first) * cols, sums + static_cast<size_t>(first) * (cols / kBlock), cols, out);
    for (int n = 0; n < count; ++n) store(first + n, out[n]);
  }
}

}  // namespace

extern "C" {

struct PocketLayer {
  const float* input_norm;           // [hidden_size]
  const float* post_attention_norm;  // [hidden_size]
  const uint8_t* qkv;                // Q4 tiles [q | k | v rows, hidden_size]
  const uint8_t* output;             // Q4 tiles [hidden_size, num_heads * head_dim]
  const uint8_t* gate_up;            // Q4 tiles [gate | up rows, hidden_size]
  const uint8_t* down;               // Q4 tiles [hidden_size, intermediate_size]
  uint16_t* kv;                      // float16 [num_slots, 2, num_kv_heads, head_dim]
};

struct PocketModel {
  int32_t hidden_size, intermediate_size, num_heads, num_kv_heads, head_dim, num_layers, vocab_size, block_size;
  float rms_norm_eps;
  const PocketLayer* layers;
  const float* norm;    // [hidden_size]
  const uint8_t* head;  // Q8 tiles [vocab_size, hidden_size]
};

struct PocketStep {
  int32_t num_rows, table_width;
  float* hidden;          // [num_rows, hidden_size]: embeddings in, hidden states out
  const float *cos, *sin; // [num_rows, head_dim / 2]
  const int64_t* tables;  // [num_rows, table_width]
  const int64_t* lengths; // [num_rows]: tokens that the row attends to, its own included
};

}  // extern "C"

namespace {

// What one call shares between its threads. All of its memory is taken here, before a helper could run out of it.
struct Work {
  Team& team;
  const PocketModel& model;
  const PocketStep* step;
  std::vector<float> qkv, attended, activated;
  std::vector<Rows> scratch;           // a thread
  std::vector<std::vector<float>> scores;  // a thread
  Phases phases;
  const float* head_input = nullptr;   // of a logits call: [head_rows, hidden_size]
  float* logits = nullptr;             // [head_rows, vocab_size]
  int head_rows = 0;

  Work(Team& t, const PocketModel& m, const PocketStep* s, size_t num_phases, int rows) : team(t), model(m), step(s), scratch(t.size()), scores(t.size()), phases(num_phases) {
    const size_t widest = std::max({m.hidden_size, m.intermediate_size, m.num_heads * m.head_dim});
    for (auto& one : scratch) {
      one.values.resize(rows * widest);
      one.sums.resize(rows * widest / kBlock);
    }
    if (step) scores.assign(t.size(), std::vector<float>(*std::max_element(s->lengths, s->lengths + rows) + kLanes));
  }
};

void copy_rows(const std::vector<float>& source, int rows, int cols, Rows& out) {
  std::copy_n(source.data(), static_cast<size_t>(rows) * cols, out.values.data());
  sum_blocks(out.values.data(), rows, cols, out.sums.data());
}

void rotate(const float* x, const float* cos, const float* sin, int half, float* out) {
  for (int i = 0; i < half; ++i) {
    out[i] = x[i] * cos[i] - x[i + half] * sin[i];
    out[i + half] = x[i + half] * cos[i] + x[i] * sin[i];
  }
}

// One head of one row: rotate its query, write the row's own key and value (by the first head of each group), attend.
AVX512 void attend(Work& work, const PocketLayer& layer, int row, int head, std::vector<float>& scores) {
  const PocketModel& m = work.model;
  const PocketStep& s = *work.step;
  const int dim = m.head_dim, half = dim / 2, group = m.num_heads / m.num_kv_heads, kv_head = head / group;
  const int length = static_cast<int>(s.lengths[row]);
  const float* qkv = work.qkv.data() + static_cast<size_t>(row) * (m.num_heads + 2 * m.num_kv_heads) * dim;
  const float *cos = s.cos + static_cast<size_t>(row) * half, *sin = s.sin + static_cast<size_t>(row) * half;
  const size_t token = 2 * static_cast<size_t>(m.num_kv_heads) * dim, value = static_cast<size_t>(m.num_kv_heads) * dim;
  const int64_t* table = s.tables + static_cast<size_t>(row) * s.table_width;
  const auto slot = [&](int position) { return layer.kv + (table[position / m.block_size] * m.block_size + position % m.block_size) * token + kv_head * dim; };

  alignas(64) float query[256], key[256];
  alignas(64) uint16_t own_key[256], own_value[256];
  rotate(qkv + head * dim, cos, sin, half, query);
  rotate(qkv + (m.num_heads + kv_head) * dim, cos, sin, half, key);
  const float* fresh = qkv + (m.num_heads + m.num_kv_heads + kv_head) * dim;
  const float scale = 1.0f / std::sqrt(static_cast<float>(dim));
  for (int i = 0; i < dim; ++i) query[i] *= scale;
  for (int i = 0; i < dim; i += 16) {
    store_half(own_key + i, key + i);
    store_half(own_value + i, fresh + i);
  }
  if (head % group == 0) {
    uint16_t* own = slot(length - 1);
    std::memcpy(own, own_key, dim * sizeof(uint16_t));
    std::memcpy(own + value, own_value, dim * sizeof(uint16_t));
  }
  float highest = -INFINITY;
  for (int position = 0; position < length; ++position) {
    const uint16_t* keys = position == length - 1 ? own_key : slot(position);
    __m512 sum = _mm512_setzero_ps();
    for (int i = 0; i < dim; i += 16) sum = _mm512_fmadd_ps(_mm512_load_ps(query + i), load_half(keys + i), sum);
    scores[position] = _mm512_reduce_add_ps(sum);
    highest = std::max(highest, scores[position]);
  }
  for (int position = length; position % kLanes; ++position) scores[position] = -INFINITY;
  __m512 total = _mm512_setzero_ps();
  for (int position = 0; position < length; position += kLanes) {
    const __m512 p = exp512(_mm512_sub_ps(_mm512_loadu_ps(scores.data() + position), _mm512_set1_ps(highest)));
    _mm512_storeu_ps(scores.data() + position, p);
    total = _mm512_mask_add_ps(total, length - position >= kLanes ? 0xffff : (1u << (length - position)) - 1, total, p);
  }
  __m512 sums[16];
  for (int i = 0; i < dim / 16; ++i) sums[i] = _mm512_setzero_ps();
  for (int position = 0; position < length; ++position) {
    const uint16_t* values = position == length - 1 ? own_value : slot(position) + value;
    const __m512 p = _mm512_set1_ps(scores[position]);
    for (int i = 0; i < dim / 16; ++i) sums[i] = _mm512_fmadd_ps(p, load_half(values + i * 16), sums[i]);
  }
  const __m512 inverse = _mm512_set1_ps(1.0f / _mm512_reduce_add_ps(total));
  float* target = work.attended.data() + (static_cast<size_t>(row) * m.num_heads + head) * dim;
  for (int i = 0; i < dim / 16; ++i) _mm512_storeu_ps(target + i * 16, _mm512_mul_ps(sums[i], inverse));
}

AVX512 void run_layers(void* argument, int thread) {
  Work& work = *static_cast<Work*>(argument);
  const PocketModel& m = work.model;
  const PocketStep& s = *work.step;
  Rows& in = work.scratch[thread];
  const int rows = s.num_rows, hidden = m.hidden_size, ffn = m.intermediate_size, q_size = m.num_heads * m.head_dim;
  const int qkv_size = q_size + 2 * m.num_kv_heads * m.head_dim;
  const auto q4 = [](const uint8_t* matrix, int tile, int cols) { return matrix + static_cast<size_t>(tile) * (cols / kBlock) * kQ4Bytes; };
  const auto add_to_hidden = [&](int phase, const std::vector<float>& source, const uint8_t* matrix, int cols) {
    work.phases.share(work.team.size(), phase, hidden / kLanes, [&] { copy_rows(source, rows, cols, in); }, [&](int tile) AVX512 {
      tile_rows(kQ4Tiles, q4(matrix, tile, cols), in.values.data(), in.sums.data(), rows, cols, [&](int row, __m512 y) AVX512 {
        float* at = s.hidden + static_cast<size_t>(row) * hidden + tile * kLanes;
        _mm512_storeu_ps(at, _mm512_add_ps(_mm512_loadu_ps(at), y));
      });
    });
  };
  int phase = 0;
  for (int index = 0; index < m.num_layers; ++index) {
    const PocketLayer& layer = m.layers[index];
    work.phases.share(work.team.size(), phase++, qkv_size / kLanes, [&] { rms_norm(s.hidden, layer.input_norm, m.rms_norm_eps, rows, hidden, in); }, [&](int tile) AVX512 {
      tile_rows(kQ4Tiles, q4(layer.qkv, tile, hidden), in.values.data(), in.sums.data(), rows, hidden,
                [&](int row, __m512 y) AVX512 { _mm512_storeu_ps(work.qkv.data() + static_cast<size_t>(row) * qkv_size + tile * kLanes, y); });
    });
    work.phases.share(work.team.size(), phase++, rows * m.num_heads, [] {}, [&](int task) { attend(work, layer, task / m.num_heads, task % m.num_heads, work.scores[thread]); });
    add_to_hidden(phase++, work.attended, layer.output, q_size);
    work.phases.share(work.team.size(), phase++, ffn / kLanes, [&] { rms_norm(s.hidden, layer.post_attention_norm, m.rms_norm_eps, rows, hidden, in); }, [&](int tile) AVX512 {
      float* to = work.activated.data() + tile * kLanes;
      tile_rows(kQ4Tiles, q4(layer.gate_up, tile, hidden), in.values.data(), in.sums.data(), rows, hidden, [&](int row, __m512 gate) AVX512 {
        const __m512 one = _mm512_set1_ps(1.0f);
        _mm512_storeu_ps(to + static_cast<size_t>(row) * ffn, _mm512_div_ps(gate, _mm512_add_ps(one, exp512(_mm512_sub_ps(_mm512_setzero_ps(), gate)))));
      });
      tile_rows(kQ4Tiles, q4(layer.gate_up, ffn / kLanes + tile, hidden), in.values.data(), in.sums.data(), rows, hidden, [&](int row, __m512 up) AVX512 {
        float* at = to + static_cast<size_t>(row) * ffn;
        _mm512_storeu_ps(at, _mm512_mul_ps(_mm512_loadu_ps(at), up));
      });
    });
    add_to_hidden(phase++, work.activated, layer.down, ffn);
  }
}

AVX512 void run_head(void* argument, int thread) {
  Work& work = *static_cast<Work*>(argument);
  const PocketModel& m = work.model;
  Rows& in = work.scratch[thread];
  work.phases.share(work.team.size(), 0, m.vocab_size / kLanes, [&] { rms_norm(work.head_input, m.norm, m.rms_norm_eps, work.head_rows, m.hidden_size, in); }, [&](int tile) AVX512 {
    tile_rows(kQ8Tiles, m.head + static_cast<size_t>(tile) * (m.hidden_size / kBlock) * kQ8Bytes, in.values.data(), in.sums.data(), work.head_rows, m.hidden_size,
              [&](int row, __m512 y) AVX512 { _mm512_storeu_ps(work.logits + static_cast<size_t>(row) * m.vocab_size + tile * kLanes, y); });
  });
}

// What a product's threads share. Rows are padded to whole tiles with zeros.
struct Product {
  Team& team;
  const uint8_t* matrix;  // Q4 tiles [out, cols]
  const float* x;         // [rows, cols]
  float* y;               // [rows, out]
  int rows, cols, out;
  std::vector<uint16_t> high, low;  // AMX: [row tile, block, 16 rows, 32] bfloat16: x = high + low
  std::vector<std::vector<uint16_t>> weights;  // AMX, a thread: one unpacked tile
  std::vector<float> sums;          // of blocks; AMX: [row tile, block, 16 rows], else [rows, cols / 32]
  Phases phases{2};
};

// One thread's tile registers: 0 and 1 sums, 2 to 7 operands, each 16 rows of 64 bytes.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

AVX512 inline __m512i round_to_bfloat16(__m512 x) {  // to nearest, ties to even; in the low half of each lane
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  return _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd), 16);
}

AVX512 void split_rows(Product& p, int tile) {
  const int blocks = p.cols / kBlock, rows = std::min(kLanes, p.rows - tile * kLanes);
  for (int row = 0; row < rows; ++row) {
    const float* source = p.x + static_cast<size_t>(tile * kLanes + row) * p.cols;
    for (int block = 0; block < blocks; ++block, source += kBlock) {
      const size_t place = (static_cast<size_t>(tile) * blocks + block) * kLanes + row;
      __m512 sum = _mm512_setzero_ps();
      for (int k = 0; k < kBlock; k += 16) {
        const __m512 value = _mm512_loadu_ps(source + k);
        const __m512i high = round_to_bfloat16(value);
        const __m512i low = round_to_bfloat16(_mm512_sub_ps(value, _mm512_castsi512_ps(_mm512_slli_epi32(high, 16))));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(p.high.data() + place * kBlock + k), _mm512_cvtepi32_epi16(high));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(p.low.data() + place * kBlock + k), _mm512_cvtepi32_epi16(low));
        sum = _mm512_add_ps(sum, value);
      }
      p.sums[place] = _mm512_reduce_add_ps(sum);
    }
  }
}

// A Q4 tile's nibbles as bfloat16, in AMX's order: a block is 16 pairs of columns, each pair side by side for 16 rows.
AVX512 void unpack_tile(const uint8_t* tile, int blocks, uint16_t* out) {
  alignas(64) uint16_t digits[32];
  for (int digit = 0; digit < 32; ++digit) {
    const float value = static_cast<float>(digit & 15);
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    digits[digit] = static_cast<uint16_t>(bits >> 16);
  }
  const __m512i table = _mm512_load_si512(digits), first = _mm512_set1_epi32(0xf), second = _mm512_set1_epi32(0xf0000);
  for (int block = 0; block < blocks; ++block, tile += kQ4Bytes) {
    for (int group = 0; group < 4; ++group) {
      __m512i nibbles = _mm512_loadu_si512(tile + group * 64);
      for (int pair = 0; pair < 4; ++pair, out += 32) {
        const __m512i index = _mm512_or_si512(_mm512_and_si512(nibbles, first), _mm512_and_si512(_mm512_slli_epi32(nibbles, 12), second));
        _mm512_storeu_si512(out, _mm512_permutexvar_epi16(index, table));
        nibbles = _mm512_srli_epi32(nibbles, 8);
      }
    }
  }
}

// acc += scale * product + minimum * sum, for 16 rows of one block.
AMX inline void add_block(const uint8_t* block, const float* product, const float* sums, __m512* acc) {
  const __m512 scale = load_half(block + 256), minimum = load_half(block + 288);
#pragma GCC unroll 16
  for (int row = 0; row < kLanes; ++row) {
    acc[row] = _mm512_fmadd_ps(scale, _mm512_load_ps(product + row * kLanes), acc[row]);
    acc[row] = _mm512_fmadd_ps(minimum, _mm512_set1_ps(sums[row]), acc[row]);
  }
}

// 16 outputs of some rows: `weights` from unpack_tile, scales from the tile itself. A block's sums leave the tile registers
// through memory, and a load that follows its tile store at once has to wait for it: so they are used two blocks later.
AMX void amx_tile(Product& p, int tile, const uint8_t* packed, const uint16_t* weights, int first_row, int end_row) {
  constexpr int kTile = kLanes * kBlock;
  const int blocks = p.cols / kBlock;
  alignas(64) float products[4][kLanes * kLanes];
  for (int first = first_row; first < end_row; first += kLanes) {
    const size_t start = static_cast<size_t>(first / kLanes) * blocks;
    const uint16_t *high = p.high.data() + start * kTile, *low = p.low.data() + start * kTile;
    const float* sums = p.sums.data() + start * kLanes;
    __m512 acc[kLanes];
#pragma GCC unroll 16
    for (int row = 0; row < kLanes; ++row) acc[row] = _mm512_setzero_ps();
    const auto add = [&](int block) AMX { add_block(packed + block * kQ4Bytes, products[block & 3], sums + block * kLanes, acc); };
    for (int block = 0; block < blocks; block += 2) {
      const bool both = block + 1 < blocks;
      _tile_zero(0);
      _tile_loadd(2, weights + block * kTile, 64);
      _tile_loadd(3, high + block * kTile, 64);
      _tile_dpbf16ps(0, 3, 2);
      _tile_loadd(4, low + block * kTile, 64);
      if (both) {
        _tile_zero(1);
        _tile_loadd(5, weights + (block + 1) * kTile, 64);
        _tile_loadd(6, high + (block + 1) * kTile, 64);
        _tile_dpbf16ps(1, 6, 5);
        _tile_loadd(7, low + (block + 1) * kTile, 64);
      }
      _tile_dpbf16ps(0, 4, 2);
      if (both) _tile_dpbf16ps(1, 7, 5);
      if (block) {
        add(block - 2);
        add(block - 1);
      }
      _tile_stored(0, products[block & 3], 64);
      if (both) _tile_stored(1, products[(block + 1) & 3], 64);
    }
    for (int block = (blocks - 1) / 2 * 2; block < blocks; ++block) add(block);
#pragma GCC unroll 16
    for (int row = 0; row < kLanes; ++row)
      if (first + row < p.rows) _mm512_storeu_ps(p.y + static_cast<size_t>(first + row) * p.out + tile * kLanes, acc[row]);
  }
}

AMX void run_amx(void* argument, int thread) {
  Product& p = *static_cast<Product*>(argument);
  const int blocks = p.cols / kBlock;
  const TileConfig config;
  uint16_t* weights = p.weights[thread].data();
  p.phases.share(p.team.size(), 0, (p.rows + kLanes - 1) / kLanes, [] {}, [&](int tile) { split_rows(p, tile); });
  _tile_loadconfig(&config);
  // Rows by the block, so that their halves stay in the cache of one core while the tiles of the matrix pass by.
  const int tiles = p.out / kLanes, block_rows = std::max(kLanes, kCachedActivations / (4 * p.cols) / kLanes * kLanes);
  const int row_blocks = (p.rows + block_rows - 1) / block_rows;
  p.phases.share(p.team.size(), 1, row_blocks * tiles, [] {}, [&](int index) AMX {
    const int tile = index % tiles, first = index / tiles * block_rows;
    const uint8_t* packed = p.matrix + static_cast<size_t>(tile) * blocks * kQ4Bytes;
    unpack_tile(packed, blocks, weights);
    amx_tile(p, tile, packed, weights, first, std::min(first + block_rows, p.rows));
  });
  _tile_release();
}

AVX512 void run_avx512(void* argument, int) {
  Product& p = *static_cast<Product*>(argument);
  const int blocks = p.cols / kBlock;
  p.phases.share(p.team.size(), 0, p.rows, [] {}, [&](int row) { sum_blocks(p.x + static_cast<size_t>(row) * p.cols, 1, p.cols, p.sums.data() + static_cast<size_t>(row) * blocks); });
  p.phases.share(p.team.size(), 1, p.out / kLanes, [] {}, [&](int tile) AVX512 {
    tile_rows(kQ4Tiles, p.matrix + static_cast<size_t>(tile) * blocks * kQ4Bytes, p.x, p.sums.data(), p.rows, p.cols,
              [&](int row, __m512 y) AVX512 { _mm512_storeu_ps(p.y + static_cast<size_t>(row) * p.out + tile * kLanes, y); });
  });
}

// Whether the processor multiplies bfloat16 tiles and the system lets this process use them (Linux grants it on request).
bool request_amx() {
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  constexpr unsigned kBf16 = 1u << 22, kTile = 1u << 24;
  if ((d & (kBf16 | kTile)) != (kBf16 | kTile)) return false;
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

}  // namespace

extern "C" {

// Whether this processor has what all of this needs.
int pocket_supported() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("fma") && __builtin_cpu_supports("avx2");
}

// Whether products of many rows run on AMX.
int pocket_amx_supported() {
  static const bool supported = request_amx();
  return supported;
}

// y = x W^T with W as Q4 tiles: x [rows, cols] -> y [rows, out], both float32. 1 when the memory is short, else 0.
int pocket_q4_product(void* team, const uint8_t* matrix, const float* x, float* y, int rows, int cols, int out) try {
  const bool amx = rows >= 12 && pocket_amx_supported();
  const int blocks = cols / kBlock;
  const size_t padded = amx ? (static_cast<size_t>(rows) + kLanes - 1) / kLanes * kLanes : rows;
  Product product{*static_cast<Team*>(team), matrix, x, y, rows, cols, out, {}, {}, {}, {}};
  product.sums.resize(padded * blocks);
  if (amx) {
    product.high.resize(padded * cols);
    product.low.resize(padded * cols);
    product.weights.assign(product.team.size(), std::vector<uint16_t>(static_cast<size_t>(blocks) * kLanes * kBlock));
  }
  product.team.run(amx ? run_amx : run_avx512, &product);
  return 0;
} catch (const std::bad_alloc&) {
  return 1;
}

// A team of at most `num_threads`, the caller included, or null when the memory is short.
void* pocket_team_create(int num_threads) try {
  return new Team(num_threads);
} catch (const std::bad_alloc&) {
  return nullptr;
}

void pocket_team_destroy(void* team) { delete static_cast<Team*>(team); }

// All layers of one step: step->hidden is changed in place, keys and values go to the cache. 0, or -1 when the memory is short.
int pocket_decode_layers(void* team, const PocketModel* model, const PocketStep* step) try {
  const size_t rows = step->num_rows;
  Work work(*static_cast<Team*>(team), *model, step, static_cast<size_t>(model->num_layers) * 5, step->num_rows);
  work.qkv.resize(rows * (model->num_heads + 2 * model->num_kv_heads) * model->head_dim);
  work.attended.resize(rows * model->num_heads * model->head_dim);
  work.activated.resize(rows * model->intermediate_size);
  work.team.run(run_layers, &work);
  return 0;
} catch (const std::bad_alloc&) {
  return -1;
}

// Final norm and output head: hidden [num_rows, hidden_size] -> logits [num_rows, vocab_size]. 0, or -1 when the memory is short.
int pocket_logits(void* team, const PocketModel* model, const float* hidden, int num_rows, float* logits) try {
  Work work(*static_cast<Team*>(team), *model, nullptr, 1, num_rows);
  work.head_input = hidden;
  work.logits = logits;
  work.head_rows = num_rows;
  work.team.run(run_head, &work);
  return 0;
} catch (const std::bad_alloc&) {
  return -1;
}

}  // extern "C"
