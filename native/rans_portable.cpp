// rANS kernels in plain C++: the path that runs everywhere.
#include "rans_driver.hpp"
#include "rans_paths.hpp"

namespace kvtide {
namespace {

struct Portable {
  static constexpr std::size_t decode_streams = 1;
  static constexpr std::size_t encode_streams = 1;

  struct Lanes {
    std::uint32_t states[rans_lanes];
  };
  struct EncodeLanes : Lanes {
    bool is_bad;
  };
  struct Symbols {
    std::uint8_t at[rans_lanes];
  };

  template <class Element>
  struct Values {
    Element at[rans_symbols];

    Values() = default;
    explicit Values(const std::uint8_t* from) { std::memcpy(at, from, sizeof at); }

    void store(const Symbols& symbols, Element* out) const {
      for (std::size_t i = 0; i < rans_lanes; ++i) out[i] = at[symbols.at[i]];
    }
  };

  static Lanes load(const std::uint8_t* from) {
    Lanes lanes;
    std::memcpy(lanes.states, from, sizeof lanes.states);
    return lanes;
  }

  static Symbols load_symbols(const std::uint8_t* from) {
    Symbols symbols;
    std::memcpy(symbols.at, from, sizeof symbols.at);
    return symbols;
  }

  static bool is_initial(const Lanes& lanes) {
    for (const std::uint32_t state : lanes.states) {
      if (state != rans_state_min) return false;
    }
    return true;
  }

  static Symbols step(Lanes& lanes, const RansDecodeTable& table, const std::uint8_t*& words) {
    return step_some(lanes, table, words, rans_lanes);
  }

  static Symbols step_some(Lanes& lanes, const RansDecodeTable& table, const std::uint8_t*& words, std::size_t count) {
    Symbols symbols{};
    const std::uint8_t* next = words;
    for (std::size_t i = 0; i < count; ++i) {
      const std::uint32_t state = lanes.states[i];
      const std::uint32_t bucket = state / rans_bucket_slots % rans_symbols;
      const std::uint32_t is_alias = state % rans_bucket_slots >= table.bucket[bucket] >> 8u;
      const std::uint32_t entry = table.packed[2 * bucket + is_alias];
      const std::uint32_t moved = (entry >> 20) * (state >> 12) + ((state + (entry >> 8)) % rans_total);
      std::uint16_t word;
      std::memcpy(&word, next, sizeof word);
      // A branch here would be a coin toss.
      const std::uint32_t is_short = moved < rans_state_min;
      lanes.states[i] = moved << 16 * is_short | (word & (0u - is_short));
      next += sizeof word * is_short;
      symbols.at[i] = static_cast<std::uint8_t>(entry);
    }
    words = next;
    return symbols;
  }

  static std::uint32_t escapes(const Symbols& symbols) {
    std::uint32_t mask = 0;
    for (std::size_t i = 0; i < rans_lanes; ++i) mask |= static_cast<std::uint32_t>(symbols.at[i] == rans_escape) << i;
    return mask;
  }

  static EncodeLanes initial() {
    EncodeLanes lanes;
    for (std::uint32_t& state : lanes.states) state = rans_state_min;
    lanes.is_bad = false;
    return lanes;
  }

  static void put(EncodeLanes& lanes, const RansEncodeTable& table, const std::uint8_t* symbols, std::uint8_t*& next,
                  std::size_t count = rans_lanes) {
    for (std::size_t i = count; i-- > 0;) {
      const std::uint32_t symbol = symbols[i] % rans_symbols;
      const std::uint32_t frequency = table.scaled[symbol] >> 4;
      lanes.is_bad |= symbols[i] >= rans_symbols || frequency == 0;
      std::uint32_t state = lanes.states[i];
      if (state >> 20 >= frequency) {
        const auto word = static_cast<std::uint16_t>(state);
        next -= sizeof word;
        std::memcpy(next, &word, sizeof word);
        state >>= 16;
      }
      const std::uint32_t reciprocal =
          static_cast<std::uint32_t>(table.reciprocal_high[symbol]) << 16 | table.reciprocal_low[symbol];
      auto quotient = static_cast<std::uint32_t>(static_cast<std::uint64_t>(state) * reciprocal >> 32);
      std::uint32_t rank = state - quotient * frequency;
      if (rank >= frequency) {
        rank -= frequency;
        ++quotient;
      }
      lanes.states[i] = quotient << 12 | slot_of(table, symbol, rank);
    }
  }

  static std::uint32_t slot_of(const RansEncodeTable& table, std::uint32_t symbol, std::uint32_t rank) {
    if (rank < table.split[symbol]) return symbol * rans_bucket_slots + rank;
    const std::uint32_t position = (rank + table.alias_base[symbol]) & 0xffff;
    std::uint32_t node = 1;
    while (node < rans_symbols) node = 2 * node + (position >= table.piece_key[node]);
    return (position + table.piece_offset[node % rans_symbols]) % rans_total;
  }

  static bool finish(const EncodeLanes& lanes, std::uint8_t* to) {
    std::memcpy(to, lanes.states, sizeof lanes.states);
    return !lanes.is_bad;
  }
};

}  // namespace

const RansPath rans_portable = {"portable", [] { return true; }, decode_with<Portable>, encode_with<Portable>,
    map_with<Portable>};

}  // namespace kvtide
