// The row for AMX, whose tiles multiply bytes: products of numbers that are split into two bytes each. All else is AVX-512's.
//
// A token's number is 256 * high + low, both signed, so that the many small ones have no high byte; a matrix's low byte is unsigned, so
// that it may be any number. A sum is low * low + (low * high + high * low) * 2^8 + high * high * 2^16, modulo 2^32 as on all paths.
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <bit>
#include <memory>

#include "tide_avx512_kernels.hpp"

namespace kvtide {
namespace {

// A row of a tile: 64 bytes, of a token's numbers or of four rows of a matrix, or 16 sums.
struct alignas(64) Line {
  std::int8_t bytes[64];
};
constexpr std::size_t tile_lines = 16;
// A chunk is what fills the lines of a tile: pairs of numbers, of which a vector holds half, of one token or one row of a panel.
constexpr std::size_t chunk_pairs = 32, vector_pairs = 16;
static_assert(tide_panel_columns == vector_pairs && tile_lines == vector_pairs && tide_panel_tokens * 4 == vector_pairs);
// Two tiles of tokens meet each tile of a matrix that is loaded.
constexpr std::size_t group_tokens = 2 * tile_lines;
// Chunks of a panel that all tokens pass by, and panels that pass by before the next chunks do: the panel's stay in the nearest cache, the
// tokens' in the core's own. With that, and panels fetched ahead, a transform over ten layers takes a sixth less.
constexpr std::size_t run_chunks = 12, strip_panels = 16;
// So few tokens or pairs of rows do not pay for being split.
constexpr std::size_t vector_tokens_max = 32, vector_pairs_max = 32;
// What is larger has no signed high byte beside a signed low one.
constexpr std::int16_t split_max = 32639;

// Matrices are split anew for each block of tokens: more tokens share that, and what it takes to fetch a large one.
struct Vectors : Avx512 {
  static constexpr std::size_t block_tokens = 256;
};
struct Amx : Vectors {};

struct alignas(64) TileConfig {
  std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
  std::uint16_t line_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  std::uint8_t lines[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
static_assert(sizeof(TileConfig) == 64);
constexpr TileConfig tile_config = {};

// A thread has tiles for as long as one of these lives: those left behind would be saved at every switch of threads.
class TileRegisters {
 public:
  TileRegisters() { _tile_loadconfig(&tile_config); }
  ~TileRegisters() { _tile_release(); }
  TileRegisters(const TileRegisters&) = delete;
  TileRegisters& operator=(const TileRegisters&) = delete;
};

// Of each 16 bits the lower ones from one vector, the upper ones from another.
Vector join(Vector lower, Vector upper) { return _mm512_ternarylogic_epi32(_mm512_set1_epi16(0xff), lower, upper, 0xca); }
// The low or high bytes of two vectors in turns.
Vector low_bytes(Vector first, Vector second) { return join(first, _mm512_slli_epi16(second, 8)); }
Vector high_bytes(Vector first, Vector second) { return join(_mm512_srli_epi16(first, 8), second); }

// The pair that `transpose_pairs` puts at place i of a vector. Matrices follow: a sum minds no order that both sides have.
constexpr std::size_t pair_at(std::size_t i) { return i % 4 * 4 + i / 4; }

// From four vectors of four pairs of four tokens to four tokens, each a vector of sixteen pairs.
void transpose_pairs(Vector (&rows)[4]) {
  const Vector a = _mm512_unpacklo_epi32(rows[0], rows[1]), b = _mm512_unpackhi_epi32(rows[0], rows[1]);
  const Vector c = _mm512_unpacklo_epi32(rows[2], rows[3]), d = _mm512_unpackhi_epi32(rows[2], rows[3]);
  rows[0] = _mm512_unpacklo_epi64(a, c);
  rows[1] = _mm512_unpackhi_epi64(a, c);
  rows[2] = _mm512_unpacklo_epi64(b, d);
  rows[3] = _mm512_unpackhi_epi64(b, d);
}

// Two tiles of tokens times one of a matrix's columns: what is to be shifted by 0, 8 and 16 bits.
struct TileSums {
  Line at[3][group_tokens];
};

template <>
class Product<Amx> {
 public:
  explicit Product(const TideMatrix& matrix)
      : matrix_(matrix), by_vectors_(matrix), pairs_(tide_pairs(matrix.used_rows)), chunks_((pairs_ + chunk_pairs - 1) / chunk_pairs),
        tokens_(std::make_unique_for_overwrite<Line[]>(chunks_ * 2 * Amx::block_tokens)),
        lists_((chunks_ + run_chunks - 1) / run_chunks) {}

  std::size_t pairs() const { return pairs_; }

  void put(const std::int16_t* tokens, std::size_t count) {
    count_ = count;
    is_split_ = count > vector_tokens_max && pairs_ > vector_pairs_max && split_tokens(tokens);
    if (!is_split_) by_vectors_.put(tokens, count);
  }

  void run(std::size_t start, std::size_t stop, std::int32_t* sums, std::size_t stride) {
    if (!is_split_) return by_vectors_.run(start, stop, sums, stride);
    const TileRegisters registers;
    for (std::size_t strip = start; strip < stop; strip += strip_panels) {
      for (std::size_t i = 0; i < lists_.size(); ++i) {
        for (std::size_t panel = strip; panel < std::min(strip + strip_panels, stop); ++panel) {
          run_panel(panel, i, sums + (panel - start) * tide_panel_columns, stride);
        }
      }
    }
  }

 private:
  // Of a run of chunks and a group of tokens, the chunks whose low or high bytes are not all zero: a bit each.
  struct Chunks {
    std::uint32_t low = 0, high = 0;
  };
  static_assert(run_chunks <= 32);
  static constexpr std::size_t groups = Amx::block_tokens / group_tokens;
  using GroupChunks = std::array<Chunks, groups>;

  // False, with anything in them, if tokens can't be split.
  bool split_tokens(const std::int16_t* tokens) {
    std::ranges::fill(lists_, GroupChunks());
    Vector largest = _mm512_setzero_si512();
    for (std::size_t group = 0; group * group_tokens < count_; ++group) {
      for (std::size_t chunk = 0; chunk < chunks_; ++chunk) largest = _mm512_max_epi16(largest, split_chunk(tokens, group, chunk));
    }
    return _mm512_cmpgt_epi16_mask(largest, _mm512_set1_epi16(split_max)) == 0;
  }

  // Splits a chunk of a group of tokens. Returns lanes that hold the largest number of them.
  Vector split_chunk(const std::int16_t* tokens, std::size_t group, std::size_t chunk) {
    const Vector half = _mm512_set1_epi16(0x80);
    Line* to = tokens_.get() + (group * chunks_ + chunk) * 2 * group_tokens;
    Vector largest = _mm512_setzero_si512(), any_low = largest, any_high = largest;
    for (std::size_t t = 0; t < group_tokens; t += tide_panel_tokens) {
      const std::size_t first = group * group_tokens + t;
      const std::size_t left = first < count_ ? std::min(chunk_pairs, pairs_ - chunk * chunk_pairs) : 0;
      const std::int16_t* from = tokens + (first * pairs_ + chunk * chunk_pairs * tide_panel_tokens) * 2;
      Vector rows[2][4];
#pragma GCC unroll 2
      for (std::size_t i = 0; i < 2; ++i) {
#pragma GCC unroll 4
        for (std::size_t j = 0; j < 4; ++j) rows[i][j] = load_pairs(from, i * vector_pairs + j * 4, left);
        transpose_pairs(rows[i]);
      }
#pragma GCC unroll 4
      for (std::size_t i = 0; i < tide_panel_tokens; ++i) {
        const Vector a = rows[0][i], b = rows[1][i];
        const Vector low = low_bytes(a, b), high = high_bytes(_mm512_add_epi16(a, half), _mm512_add_epi16(b, half));
        largest = _mm512_max_epi16(largest, _mm512_max_epi16(a, b));
        any_low = _mm512_or_si512(any_low, low);
        any_high = _mm512_or_si512(any_high, high);
        _mm512_store_si512(to + t + i, low);
        _mm512_store_si512(to + group_tokens + t + i, high);
      }
    }
    Chunks& listed = lists_[chunk / run_chunks][group];
    const std::uint32_t bit = 1u << chunk % run_chunks;
    if (_mm512_test_epi8_mask(any_low, any_low) != 0) listed.low |= bit;
    if (_mm512_test_epi8_mask(any_high, any_high) != 0) listed.high |= bit;
    return largest;
  }

  // Four pairs of a panel of tokens from `pair` on; zeros where none are left.
  static Vector load_pairs(const std::int16_t* from, std::size_t pair, std::size_t left) {
    const std::size_t count = std::min<std::size_t>(left - std::min(pair, left), 4);
    const auto mask = static_cast<__mmask16>((1u << count * tide_panel_tokens) - 1);
    return _mm512_maskz_loadu_epi32(mask, from + pair * tide_panel_tokens * 2);
  }

  // Multiplies a run of chunks of one panel, and adds that to the sums of the runs before it.
  void run_panel(std::size_t panel, std::size_t run, std::int32_t* sums, std::size_t stride) {
    const std::size_t first_pair = run * run_chunks * chunk_pairs, last_panel = tide_panels(matrix_.columns) - 1;
    split_panel(panel_at(panel), run);
    TileSums found;
    for (std::size_t group = 0; group * group_tokens < count_; ++group) {
      const Chunks listed = lists_[run][group];
      if (run != 0 && (listed.low | listed.high) == 0) continue;
      const std::size_t first = group * group_tokens;
      const std::int16_t* next = panel_at(std::min(panel + 1, last_panel)) + (first_pair + group * chunk_pairs / groups) * row_size;
      multiply(tokens_.get() + (first * chunks_ + run * run_chunks * group_tokens) * 2, listed, next, found);
      const Rest rest{listed.high != 0, run != 0};
      join_sums(found, rest, std::min(group_tokens, count_ - first), sums + first * stride, stride);
    }
  }

  const std::int16_t* panel_at(std::size_t panel) const { return matrix_.panels.data() + panel * tide_pairs(matrix_.rows) * row_size; }

  // Splits those of a run's chunks that some token needs.
  void split_panel(const std::int16_t* panel, std::size_t run) {
    std::uint32_t used = 0;
    for (const Chunks listed : lists_[run]) used |= listed.low | listed.high;
    for (; used != 0; used &= used - 1) {
      const auto chunk = static_cast<std::size_t>(std::countr_zero(used));
      for (std::size_t i = 0; i < tile_lines; ++i) {
        const std::size_t pair = (run * run_chunks + chunk) * chunk_pairs + i;
        const Vector first = load_row(panel, pair), second = load_row(panel, pair + vector_pairs);
        Line* to = columns_[chunk][0] + pair_at(i);
        _mm512_store_si512(to, low_bytes(first, second));
        _mm512_store_si512(to + tile_lines, high_bytes(first, second));
      }
    }
  }

  // What lies behind the last pair meets zeros, but it has to be there.
  Vector load_row(const std::int16_t* panel, std::size_t pair) const {
    return pair < pairs_ ? load64(panel + pair * row_size) : _mm512_setzero_si512();
  }

  // tokens: of a group, from the run's first chunk on. next: this group's share of the panel that is split next, fetched meanwhile; it may
  // reach behind the matrix, where fetching does nothing.
  void multiply(const Line* tokens, Chunks listed, const std::int16_t* next, TileSums& found) const {
    // Compilers don't know that tiles are loaded from memory.
    std::atomic_signal_fence(std::memory_order_seq_cst);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (std::uint32_t left = listed.low; left != 0; left &= left - 1) {
      const auto chunk = static_cast<std::size_t>(std::countr_zero(left));
      const Line* token = tokens + chunk * 2 * group_tokens;
      const Line* column = columns_[chunk][0];
      for (std::size_t i = 0; i < chunk_pairs / groups; ++i) _mm_prefetch(next + (chunk * chunk_pairs + i) * row_size, _MM_HINT_T0);
      _tile_loadd(4, token, sizeof(Line));
      _tile_loadd(6, column, sizeof(Line));
      _tile_dpbsud(0, 4, 6);
      _tile_loadd(5, token + tile_lines, sizeof(Line));
      _tile_dpbsud(1, 5, 6);
      _tile_loadd(7, column + tile_lines, sizeof(Line));
      _tile_dpbssd(2, 4, 7);
      _tile_dpbssd(3, 5, 7);
    }
    _tile_stored(0, found.at[0], sizeof(Line));
    _tile_stored(1, found.at[0] + tile_lines, sizeof(Line));
    _tile_zero(0);
    _tile_zero(1);
    for (std::uint32_t left = listed.high; left != 0; left &= left - 1) {
      const auto chunk = static_cast<std::size_t>(std::countr_zero(left));
      const Line* token = tokens + (chunk * 2 + 1) * group_tokens;
      const Line* column = columns_[chunk][0];
      _tile_loadd(4, token, sizeof(Line));
      _tile_loadd(6, column, sizeof(Line));
      _tile_dpbsud(2, 4, 6);
      _tile_loadd(5, token + tile_lines, sizeof(Line));
      _tile_dpbsud(3, 5, 6);
      _tile_loadd(7, column + tile_lines, sizeof(Line));
      _tile_dpbssd(0, 4, 7);
      _tile_dpbssd(1, 5, 7);
    }
    _tile_stored(2, found.at[1], sizeof(Line));
    _tile_stored(3, found.at[1] + tile_lines, sizeof(Line));
    if (listed.high == 0) return;
    _tile_stored(0, found.at[2], sizeof(Line));
    _tile_stored(1, found.at[2] + tile_lines, sizeof(Line));
  }

  // What a sum has beside the products of low bytes of tokens.
  struct Rest {
    bool has_high, has_earlier;
  };

  static void join_sums(const TileSums& found, Rest rest, std::size_t count, std::int32_t* sums, std::size_t stride) {
    for (std::size_t t = 0; t < count; ++t) {
      std::int32_t* to = sums + t * stride;
      Vector sum = _mm512_load_si512(found.at[0] + t);
      sum = _mm512_add_epi32(sum, _mm512_slli_epi32(_mm512_load_si512(found.at[1] + t), 8));
      if (rest.has_high) sum = _mm512_add_epi32(sum, _mm512_slli_epi32(_mm512_load_si512(found.at[2] + t), 16));
      if (rest.has_earlier) sum = _mm512_add_epi32(sum, _mm512_loadu_si512(to));
      _mm512_storeu_si512(to, sum);
    }
  }

  // Numbers of a row of a panel, two of each column.
  static constexpr std::size_t row_size = 2 * tide_panel_columns;

  const TideMatrix& matrix_;
  Product<Vectors> by_vectors_;
  std::size_t pairs_, chunks_, count_ = 0;
  bool is_split_ = true;
  std::unique_ptr<Line[]> tokens_;           // [groups][chunks][low, high][32]
  std::vector<GroupChunks> lists_;           // of each run of chunks
  Line columns_[run_chunks][2][tile_lines];  // of the panel at hand: [low, high][16]
};

// Linux lends a process its tiles, 8 KiB a thread, when it asks.
bool may_use_tiles() {
  constexpr long ask_for_feature = 0x1023, tile_data = 18;
  return syscall(SYS_arch_prctl, ask_for_feature, tile_data) == 0;
}

bool has_amx() {
  constexpr unsigned amx_tile = 1u << 24, amx_int8 = 1u << 25;
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (d & amx_tile) != 0 && (d & amx_int8) != 0;
}

bool is_supported() {
  static const bool is_found = has_avx512() && has_amx() && may_use_tiles();
  return is_found;
}

}  // namespace

const TidePath tide_amx = tide_path<Amx>("amx", is_supported);

}  // namespace kvtide
