// Alias rANS (docs/codec.md, "Entropy coders: rans"): a warp for each stream, a lane for each state.
#pragma once

#include "base.cuh"

constexpr u32 rans_symbols = 32;
constexpr u32 rans_state_min = 1u << 16;
constexpr u32 rans_states_words = 2 * warp_lanes;  // the states in front of the words, in u16
constexpr u32 rans_escape = 31;
constexpr u32 rans_slots = 4096;

// A stream and its symbols, by addresses. Streams begin on 4 bytes and have a word to spare behind them.
struct RansStream {
  const u8* stream;   // or room to encode into, filled from its end
  const u16* runs;    // the table of each run
  u64 symbols;        // elements that it decodes to, or symbols
  u64 escapes;        // elements
  const u32* tables;  // (tables, 32), as RansLane or RansCode
  u64 values;         // (tables, 32) elements
  u32* status;        // set to 1 if it does not hold exactly its symbols, or a symbol has no probability
  u32 stream_bytes, count, run_symbols, escape_count;
};
static_assert(sizeof(RansStream) == 72);

// What lane i keeps of a table: bucket i. `own`: frequency << 20 | bias << 8 | slots that are the bucket's own symbol's;
// `other`: frequency << 20 | bias << 8 | symbol of the other slots. Slot plus bias, modulo 2^12, is the rank.
struct RansLane {
  u32 own, other;
};

// What lane i keeps of a table to encode with. `share`, of symbol i: frequency << 20 | slots in its own bucket << 12 | slots that
// symbols before it have in others'. `reciprocal`: floor(2^32 / frequency), at most 2^32 - 1. `piece`, i-th of the buckets that
// have another's slots, by symbol and bucket: such slots before it << 12 | its first one; all bits set where there is none.
struct RansCode {
  u32 share, reciprocal, piece;
};

constexpr u32 rans_bucket = rans_slots / rans_symbols;
constexpr u32 rans_warps = 8;

struct RansTablesArgs {
  const u16* frequencies;  // (tables, 32)
  RansLane* lanes;
  RansCode* codes;
  u64 table_count;
};

struct RansBuckets {
  u32 split[rans_symbols], alias[rans_symbols];
};

// docs/codec.md, "Alias table".
INLINE void fill_buckets(const u16* frequencies, RansBuckets& buckets) {
  const auto next_donor = [&](u32 from) {
    while (from < rans_symbols - 1 && frequencies[from] <= rans_bucket) ++from;
    return from;
  };
  u32 donor = next_donor(0);
  const auto fill = [&](u32 bucket) {
    buckets.alias[bucket] = donor;
    buckets.split[donor] -= rans_bucket - buckets.split[bucket];
  };
  for (u32 bucket = 0; bucket < rans_symbols; ++bucket) {
    if (frequencies[bucket] >= rans_bucket) continue;
    while (buckets.split[donor] == rans_bucket) donor = next_donor(donor + 1);
    fill(bucket);
    while (buckets.split[donor] < rans_bucket) {
      const u32 short_donor = donor;
      donor = next_donor(donor + 1);
      fill(short_donor);
    }
  }
}

// Makes what lanes keep of tables: a warp for each.
KERNEL rans_tables(RansTablesArgs args) {
  __shared__ RansBuckets shared[rans_warps];
  const u32 lane = lane_of_warp();
  RansBuckets& buckets = shared[warp_of_block()];
  for (u64 i = first_job(); i < args.table_count; i += job_stride()) {
    const u16* frequencies = args.frequencies + i * rans_symbols;
    const u32 frequency = frequencies[lane];
    buckets.split[lane] = frequency;
    buckets.alias[lane] = lane;
    __syncwarp();
    if (lane == 0) fill_buckets(frequencies, buckets);
    __syncwarp();
    const u32 split = buckets.split[lane], alias = buckets.alias[lane], first = lane * rans_bucket + split;
    u32 rank = buckets.split[alias], place = 0, piece = 0, before = 0;
    for (u32 k = 0; k < rans_symbols; ++k) {
      const u32 slots = rans_bucket - buckets.split[k], owner = buckets.alias[k];
      if (owner == alias && k < lane) rank += slots;
      if (owner < alias || (owner == alias && k < lane)) {
        place += slots;
        piece += slots != 0;
      }
      if (owner < lane) before += slots;
    }
    const u32 own_bias = (rans_slots - lane * rans_bucket) % rans_slots, bias = (rank - first) % rans_slots;
    RansLane* row = args.lanes + i * rans_symbols;
    RansCode* codes = args.codes + i * rans_symbols;
    row[lane] = {frequency << 20 | own_bias << 8 | split, split < rans_bucket ? u32{frequencies[alias]} << 20 | bias << 8 | alias : 0};
    const u32 pieces = count_bits(ballot(split < rans_bucket));
    codes[lane].share = frequency << 20 | split << 12 | before % rans_slots;
    codes[lane].reciprocal = frequency == 0 ? 0 : frequency == 1 ? 0xffffffffu : static_cast<u32>((u64{1} << 32) / frequency);
    if (split < rans_bucket) codes[piece].piece = place << 12 | first;
    if (lane >= pieces) codes[lane].piece = 0xffffffffu;
    __syncwarp();
  }
}

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
  const RansStream* streams;
  u64 stream_count;
  u64 element_bytes;
  u64 has_escapes;
};

template <class Element, bool has_escapes>
INLINE bool decode_stream(const RansStream& job, u32 lane) {
  if (job.count == 0) return job.stream_bytes == 0 && job.escape_count == 0;
  u32 state;
  RansWords words;
  if (!rans_open(job.stream, job.stream_bytes, lane, state, words)) return false;
  const Element* values = reinterpret_cast<const Element*>(job.values);
  const Element* escapes = reinterpret_cast<const Element*>(job.escapes);
  Element* out = reinterpret_cast<Element*>(job.symbols);
  u32 escapes_taken = 0;
  for (u32 first = 0, run = 0; first < job.count; first += job.run_symbols, ++run) {
    const u32 stop = job.count - first < job.run_symbols ? job.count : first + job.run_symbols;
    const u32 table = job.runs[run];
    const RansLane buckets = load_lane(job.tables, table, lane);
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
  return args.has_escapes != 0 ? decode_stream<Element, true>(job, lane) : decode_stream<Element, false>(job, lane);
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
    if (lane == 0 && !is_good) *job.status = 1;
  }
}

struct RansEncodeArgs {
  const RansStream* streams;
  u64 stream_count;
  u32* sizes;  // bytes of each stream
};

INLINE u32 rans_words_max(u32 count) { return count + rans_states_words; }

INLINE RansCode load_code(const u32* tables, u32 table, u32 lane) {
  const u32* entry = tables + (table * rans_symbols + lane) * 3;
  return {entry[0], entry[1], entry[2]};
}

// The slot of a symbol's rank that is not in its own bucket: the last piece that begins no later has it.
INLINE u32 slot_of_piece(const RansCode& table, u32 place) {
  u32 piece = 0;
#pragma unroll
  for (u32 step = rans_symbols / 2; step != 0; step /= 2) {
    const u32 next = shuffle(table.piece, piece + step);
    if (next >> 12 <= place) piece += step;
  }
  const u32 found = shuffle(table.piece, piece);
  return (found & 4095u) + place - (found >> 12);
}

// Puts the symbol of each active lane in front of what was put before.
INLINE bool rans_put(u32& state, u32 symbol, const RansCode& table, u16* words, u32& next, u32 lane, bool is_active) {
  const u32 share = shuffle(table.share, symbol), reciprocal = shuffle(table.reciprocal, symbol);
  const u32 frequency = share >> 20, own = share >> 12 & 255u;
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
  const u32 other = slot_of_piece(table, (share & 4095u) + rank - own);
  if (is_active) state = quotient << 12 | (rank < own ? symbol * rans_bucket + rank : other);
  return true;
}

INLINE void put_states(u16* to, u32 state, u32 lane) {
  to[2 * lane] = static_cast<u16>(state);
  to[2 * lane + 1] = static_cast<u16>(state >> 16);
}

// Symbols as they are, a byte each.
struct ByteSymbols {
  const u8* symbols;
  INLINE u32 take(u32, u32 at, u32 lane, bool is_active) const { return is_active ? symbols[at + lane] : 0; }
};

// `symbols` gives the symbols of a row of lanes: of a run, from a position in the stream on. Rows are asked for from the last on.
template <class Symbols>
INLINE bool encode_stream(const RansStream& job, Symbols& symbols, u32 lane, u32& next) {
  u16* words = reinterpret_cast<u16*>(const_cast<u8*>(job.stream));
  if (job.stream_bytes / 2 < rans_words_max(job.count)) return false;
  u32 state = rans_state_min, stop = job.count;
  while (stop != 0) {
    const u32 run = (stop - 1) / job.run_symbols, first = run * job.run_symbols;
    const RansCode codes = load_code(job.tables, job.runs[run], lane);
    const u32 rest = (stop - first) % warp_lanes;
    u32 row = stop - rest;
    if (rest != 0) {
      const bool is_active = lane < rest;
      if (!rans_put(state, symbols.take(run, row, lane, is_active), codes, words, next, lane, is_active)) return false;
    }
#pragma unroll 1
    while (row != first) {
      row -= warp_lanes;
      if (!rans_put(state, symbols.take(run, row, lane, true), codes, words, next, lane, true)) return false;
    }
    stop = first;
  }
  next -= rans_states_words;
  put_states(words + next, state, lane);
  return true;
}

// Codes one stream and notes its size.
template <class Symbols>
INLINE void encode_job(const RansEncodeArgs& args, u64 i, const RansStream& job, Symbols& symbols, u32 lane) {
  u32 next = job.stream_bytes / 2;
  const bool is_good = job.count == 0 || encode_stream(job, symbols, lane, next);
  if (lane == 0) args.sizes[i] = 2 * (job.stream_bytes / 2 - next);
  if (lane == 0 && !is_good) *job.status = 1;
}

KERNEL rans_encode(RansEncodeArgs args) {
  const u32 lane = lane_of_warp();
  for (u64 i = first_job(); i < args.stream_count; i += job_stride()) {
    const RansStream job = args.streams[i];
    ByteSymbols symbols = {reinterpret_cast<const u8*>(job.symbols)};
    encode_job(args, i, job, symbols, lane);
  }
}

struct PackArgs {
  const u64* ends;    // addresses: where rooms end that were filled from there
  const u32* sizes;   // bytes in each, even
  const u64* starts;  // where they go
  u64 count;
  u8* out;
};

// Puts what is at the ends of rooms side by side: a warp for each.
KERNEL pack(PackArgs args) {
  const u32 lane = lane_of_warp();
  for (u64 i = first_job(); i < args.count; i += job_stride()) {
    const u32 words = args.sizes[i] / 2;
    const u16* from = reinterpret_cast<const u16*>(args.ends[i]) - words;
    u16* to = reinterpret_cast<u16*>(args.out + args.starts[i]);
    for (u32 word = lane; word < words; word += warp_lanes) to[word] = from[word];
  }
}
