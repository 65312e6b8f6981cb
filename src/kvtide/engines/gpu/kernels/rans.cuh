// Alias rANS (docs/codec.md, "Entropy coders: rans"): a warp for each stream, a lane for each state.
#pragma once

#include "base.cuh"

constexpr u32 rans_symbols = 32;
constexpr u32 rans_state_min = 1u << 16;
constexpr u32 rans_states_words = 2 * warp_lanes;  // the states in front of the words, in u16
constexpr u32 rans_escape = 31;
constexpr u32 rans_slots = 4096;

// A stream and its symbols. Streams begin on 4 bytes and have a word to spare behind them.
struct RansStream {
  u64 stream_start;   // bytes into `data`
  u64 runs_start;     // into `run_tables`
  u64 symbols_start;  // elements into `out`, or symbols
  u64 escapes_start;  // elements into `escapes`
  u32 stream_bytes, count, run_symbols, escape_count;
};
static_assert(sizeof(RansStream) == 48);

// What lane i keeps of a table: bucket i. `own`: frequency << 20 | bias << 8 | slots that are the bucket's own symbol's;
// `other`: frequency << 20 | bias << 8 | symbol of the other slots. Slot plus bias, modulo 2^12, is the rank.
struct RansLane {
  u32 own, other;
};

INLINE RansLane load_lane(const u32* tables, u32 table, u32 lane) {
  const u32* entry = tables + (table * rans_symbols + lane) * 2;
  return {entry[0], entry[1]};
}

// The words of a stream: reading is bounded by `stop`, where one word more may be read.
struct RansWords {
  const u16* at;
  u32 next, stop;
};

// Takes the next symbol of each lane that is active: the lowest five bits of the result.
INLINE u32 rans_step(u32& state, const RansLane& table, RansWords& words, u32 lane, bool is_active) {
  const u32 bucket = state >> 7;
  const u32 own = shuffle(table.own, bucket), other = shuffle(table.other, bucket);
  const bool is_other = (state & 127u) >= (own & 255u);
  const u32 entry = is_other ? other : own;
  const u32 symbol = is_other ? other : bucket;
  u32 moved = (entry >> 20) * (state >> 12) + ((state + (entry >> 8)) & 4095u);
  const bool is_short = is_active && moved < rans_state_min;
  const u32 mask = ballot(is_short);
  if (is_short) moved = moved << 16 | words.at[smaller(words.next + count_bits(mask & lanes_below(lane)), words.stop)];
  words.next += count_bits(mask);
  if (is_active) state = moved;
  return symbol;
}

// A stream from its states on. False, for all lanes, if it can't be one.
INLINE bool rans_open(const u8* stream, u32 stream_bytes, u32 lane, u32& state, RansWords& words) {
  if (stream_bytes < 2 * rans_states_words || stream_bytes % 2 != 0) return false;
  state = reinterpret_cast<const u32*>(stream)[lane];
  words = {reinterpret_cast<const u16*>(stream) + rans_states_words, 0, stream_bytes / 2 - rans_states_words};
  return !any_lane(state < rans_state_min);
}

INLINE bool rans_is_whole(u32 state, const RansWords& words) {
  return !any_lane(state != rans_state_min) && words.next == words.stop;
}

struct RansDecodeArgs {
  const u8* data;
  const RansStream* streams;
  u64 stream_count;
  const u32* tables;      // (tables, 32, 2), as RansLane
  const u16* run_tables;
  const u8* values;       // (tables, 32) elements
  const u8* escapes;      // elements
  u8* out;                // elements
  u32* status;            // of each stream: 0, or 1 if it does not hold exactly its symbols
  u64 element_bytes;
  u64 has_escapes;
};

template <class Element, bool has_escapes>
INLINE bool decode_stream(const RansDecodeArgs& args, const RansStream& job, u32 lane) {
  if (job.count == 0) return job.stream_bytes == 0 && job.escape_count == 0;
  u32 state;
  RansWords words;
  if (!rans_open(args.data + job.stream_start, job.stream_bytes, lane, state, words)) return false;
  const Element* values = reinterpret_cast<const Element*>(args.values);
  const Element* escapes = reinterpret_cast<const Element*>(args.escapes) + job.escapes_start;
  Element* out = reinterpret_cast<Element*>(args.out) + job.symbols_start;
  u32 escapes_taken = 0;
  for (u32 first = 0, run = 0; first < job.count; first += job.run_symbols, ++run) {
    const u32 stop = job.count - first < job.run_symbols ? job.count : first + job.run_symbols;
    const u32 table = args.run_tables[job.runs_start + run];
    const RansLane buckets = load_lane(args.tables, table, lane);
    const u32 value = values[table * rans_symbols + lane];
    Element* to = out + first + lane;
    const auto put = [&](bool is_active) {
      const u32 symbol = rans_step(state, buckets, words, lane, is_active);
      Element element = static_cast<Element>(shuffle(value, symbol));
      if constexpr (has_escapes) {
        const bool is_escape = is_active && symbol % rans_symbols == rans_escape;
        const u32 mask = ballot(is_escape), rank = escapes_taken + count_bits(mask & lanes_below(lane));
        if (is_escape && rank < job.escape_count) element = escapes[rank];
        escapes_taken += count_bits(mask);
      }
      if (is_active) *to = element;
      to += warp_lanes;
    };
#pragma unroll 4
    for (u32 rows = (stop - first) / warp_lanes; rows != 0; --rows) put(true);
    if ((stop - first) % warp_lanes != 0) put(lane < (stop - first) % warp_lanes);
    if (stop == job.count) break;  // first + run_symbols may not fit 32 bits
  }
  return rans_is_whole(state, words) && escapes_taken == job.escape_count;
}

template <class Element>
INLINE bool decode_stream(const RansDecodeArgs& args, const RansStream& job, u32 lane) {
  return args.has_escapes != 0 ? decode_stream<Element, true>(args, job, lane) : decode_stream<Element, false>(args, job, lane);
}

KERNEL rans_decode(RansDecodeArgs args) {
  const u32 lane = lane_of_warp();
  for (u64 i = first_job(); i < args.stream_count; i += job_stride()) {
    const RansStream job = args.streams[i];
    bool is_good;
    if (args.element_bytes == 1) {
      is_good = decode_stream<u8>(args, job, lane);
    } else if (args.element_bytes == 2) {
      is_good = decode_stream<u16>(args, job, lane);
    } else {
      is_good = decode_stream<u32>(args, job, lane);
    }
    if (lane == 0) args.status[i] = is_good ? 0 : 1;
  }
}

// What lane i keeps of a table to encode with: symbol i. `share`: frequency << 16 | first place in the slot list;
// `reciprocal`: floor(2^32 / frequency), at most 2^32 - 1.
struct RansShare {
  u32 share, reciprocal;
};

struct RansEncodeArgs {
  const u8* symbols;
  const RansStream* streams;  // stream_start and stream_bytes are the room, which is filled from its end
  u64 stream_count;
  const u32* shares;          // (tables, 32, 2), as RansShare
  const u16* slots;           // (tables, 4096): slots by symbol and rank
  const u16* run_tables;
  u8* data;
  u32* sizes;                 // bytes of each stream
  u32* status;                // of each stream: 0, or 1 if a symbol has no probability or the room is too small
};

INLINE u32 rans_words_max(u32 count) { return count + rans_states_words; }

// Puts the symbol of each active lane in front of what was put before.
INLINE bool rans_put(u32& state, u32 symbol, const RansShare& table, const u16* slots, u16* words, u32& next, u32 lane, bool is_active) {
  const u32 share = shuffle(table.share, symbol), reciprocal = shuffle(table.reciprocal, symbol);
  const u32 frequency = share >> 16;
  if (any_lane(is_active && (symbol >= rans_symbols || frequency == 0))) return false;
  const bool is_long = is_active && state >> 20 >= frequency;
  const u32 mask = ballot(is_long);
  if (is_long) {
    words[next - count_bits(mask >> lane)] = static_cast<u16>(state);
    state >>= 16;
  }
  next -= count_bits(mask);
  u32 quotient = __umulhi(state, reciprocal), rank = state - quotient * frequency;
  if (rank >= frequency) {
    rank -= frequency;
    ++quotient;
  }
  if (is_active) state = quotient << 12 | slots[(share & 0xffffu) + rank];
  return true;
}

INLINE void put_states(u16* to, u32 state, u32 lane) {
  to[2 * lane] = static_cast<u16>(state);
  to[2 * lane + 1] = static_cast<u16>(state >> 16);
}

INLINE bool encode_stream(const RansEncodeArgs& args, const RansStream& job, u32 lane, u32& next) {
  const u8* symbols = args.symbols + job.symbols_start;
  u16* words = reinterpret_cast<u16*>(args.data + job.stream_start);
  if (job.stream_bytes / 2 < rans_words_max(job.count)) return false;
  u32 state = rans_state_min, stop = job.count;
  while (stop != 0) {
    const u32 run = (stop - 1) / job.run_symbols, first = run * job.run_symbols;
    const u32 table = args.run_tables[job.runs_start + run];
    const u32* entry = args.shares + (table * rans_symbols + lane) * 2;
    const RansShare shares = {entry[0], entry[1]};
    const u16* slots = args.slots + table * rans_slots;
    const u32 rest = (stop - first) % warp_lanes;
    u32 row = stop - rest;
    if (rest != 0) {
      const bool is_active = lane < rest;
      if (!rans_put(state, is_active ? symbols[row + lane] : 0, shares, slots, words, next, lane, is_active)) return false;
    }
    while (row != first) {
      row -= warp_lanes;
      if (!rans_put(state, symbols[row + lane], shares, slots, words, next, lane, true)) return false;
    }
    stop = first;
  }
  next -= rans_states_words;
  put_states(words + next, state, lane);
  return true;
}

KERNEL rans_encode(RansEncodeArgs args) {
  const u32 lane = lane_of_warp();
  for (u64 i = first_job(); i < args.stream_count; i += job_stride()) {
    const RansStream job = args.streams[i];
    u32 next = job.stream_bytes / 2;
    const bool is_good = job.count == 0 || encode_stream(args, job, lane, next);
    if (lane == 0) {
      args.sizes[i] = 2 * (job.stream_bytes / 2 - next);
      args.status[i] = is_good ? 0 : 1;
    }
  }
}

struct RansPackArgs {
  const u8* data;             // rooms, each stream at its room's end
  const RansStream* streams;
  u64 stream_count;
  const u32* sizes;
  const u64* starts;          // where each stream goes, even
  u8* out;
};

// Moves streams out of their rooms.
KERNEL rans_pack(RansPackArgs args) {
  const u32 lane = lane_of_warp();
  for (u64 i = first_job(); i < args.stream_count; i += job_stride()) {
    const RansStream job = args.streams[i];
    const u32 words = args.sizes[i] / 2;
    const u16* from = reinterpret_cast<const u16*>(args.data + job.stream_start) + job.stream_bytes / 2 - words;
    u16* to = reinterpret_cast<u16*>(args.out + args.starts[i]);
    for (u32 word = lane; word < words; word += warp_lanes) to[word] = from[word];
  }
}
