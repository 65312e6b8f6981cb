// Lists of the codec tide (docs/codec.md, "Codec tide-1"): where each row's items stand, decoding, and dealing them out.
//
// How long lists are depends on the values so far, so it is counted here: nothing goes back to the host between sections.
#pragma once

#include "rans.cuh"

constexpr u32 tide_parts = 4;
constexpr u32 tide_tops = 32;
constexpr u32 tide_tables = 128;
constexpr i32 tide_third = 19;
constexpr i32 tide_enter = -37;
constexpr i32 tide_wide = 24;
constexpr u32 run_symbols = 32;
constexpr i32 top_centre = 15;
constexpr u32 place_warps = 8;
constexpr u32 chunk_rows = warp_lanes / tide_parts;

// A section of some rows, being decoded. Rows have a scale in units; those that don't enter at this step are left alone.
struct TideSection {
  const i16* scales;          // (rows)
  i16* values;                // (rows, tokens), tokens in coded order
  u32* tallies;               // (rows, parts): how many values so far are 0, and << 16 how many are 1 or -1
  u32* cursors;               // (planes, rows, parts) in a base, (rows, parts, 3) in a refinement: scratch
  i16* items;                 // scratch: all lists
  u32* run_starts;            // (tables + 1): runs before each table's
  const u8* streams[2];
  const i16* escapes[2];
  u32* status;                // 0; 1 once something does not fit
  u32 stream_bytes[2], escape_counts[2];
  u32 rows, tokens, planes, items_max;
  i32 base_units, refinement;
  i8 gains[tide_parts];
  u32 zero;
};
static_assert(sizeof(TideSection) == 136);

INLINE u32 part_start(u32 part, u32 tokens) { return static_cast<u32>(u64{part} * tokens / tide_parts); }
INLINE u32 part_of(u32 token, u32 tokens) {
  u32 part = 0;
  for (u32 next = 1; next < tide_parts; ++next) part += token >= part_start(next, tokens);
  return part;
}

INLINE i32 section_units(const TideSection& s) { return s.base_units - tide_third * s.refinement; }
INLINE bool enters(i32 scale, i32 units) { return scale - units >= tide_enter; }
// How often the base's step is tripled before a component's top value fits.
INLINE i32 thirds_of(i32 scale, i32 base_units) {
  const i32 thirds = -floor_div(base_units + tide_wide - scale, tide_third);
  return thirds > 0 ? thirds : 0;
}
INLINE u32 top_table(i32 over) { return static_cast<u32>(clipped(floor_div(over + 60, 3), 0, 31)); }
INLINE u32 digit_table(i32 over) { return tide_tops + 4 * static_cast<u32>(clipped(floor_div(over + 36, 3), 0, 23)); }

// What a part of a row takes from lists: counts[i] of list `table + i`, of one list or of three; none if there are no lists.
struct Taken {
  u32 table, lists;
  u32 counts[3];
};

// Passes are planes from the coarsest on, digits before top values.
INLINE Taken taken_of(const TideSection& s, u32 pass, u32 row, u32 part) {
  const Taken none = {tide_tables, 0, {0, 0, 0}};
  if (row >= s.rows) return none;
  const i32 scale = s.scales[row], units = section_units(s);
  if (!enters(scale, units)) return none;
  const bool is_top_pass = pass % 2 == 1;
  const u32 count = part_start(part + 1, s.tokens) - part_start(part, s.tokens);
  if (s.refinement != 0) {
    const bool is_digit = enters(scale, units + tide_third);
    if (is_digit == is_top_pass) return none;
    const i32 over = scale + s.gains[part] - units;
    if (!is_digit) return {top_table(over), 1, {count, 0, 0}};
    const u32 tally = s.tallies[row * tide_parts + part], zeros = tally & 0xffffu, ones = tally >> 16;
    return {digit_table(over), 3, {zeros, ones, count - zeros - ones}};
  }
  const i32 third = static_cast<i32>(s.planes - 1 - pass / 2), thirds = thirds_of(scale, s.base_units);
  const i32 over = scale + s.gains[part] - (units + tide_third * third);
  if (is_top_pass && thirds == third) return {top_table(over), 1, {count, 0, 0}};
  if (!is_top_pass && thirds > third) return {digit_table(over) + 3, 1, {count, 0, 0}};
  return none;
}

INLINE u32 cursor_place(const TideSection& s, u32 third, u32 row, u32 part) {
  return s.refinement != 0 ? (row * tide_parts + part) * 3 : (third * s.rows + row) * tide_parts + part;
}

struct TideListsArgs {
  const TideSection* sections;
  u64 section_count;
  const u32* tables;  // rANS tables, (128, 32, 2)
  u64 rows_max;
};

struct PlaceShared {
  u32 counts[place_warps][tide_tables];
  u32 totals[tide_tables];
  u32 run_starts[tide_tables + 1];
};

// Each warp has a stretch of all (pass, row) in order: counts what it takes of each table.
INLINE void count_stretch(const TideSection& s, u32 first, u32 stop, u32 chunks, u32* counts, u32 lane) {
  for (u32 chunk = first; chunk < stop; ++chunk) {
    const Taken taken = taken_of(s, chunk / chunks, chunk % chunks * chunk_rows + lane / tide_parts, lane % tide_parts);
#pragma unroll
    for (u32 i = 0; i < 3; ++i) {
      if (i < taken.lists) atomicAdd(counts + taken.table + i, taken.counts[i]);
    }
  }
}

// Runs of all tables; they fill two streams of as many.
INLINE void lay_runs(PlaceShared& shared) {
  u32 runs = 0, last = 0;
  for (u32 table = 0; table < tide_tables; ++table) {
    shared.run_starts[table] = runs;
    runs += (shared.totals[table] + run_symbols - 1) / run_symbols;
    if (shared.totals[table] != 0) last = table;
  }
  if (runs % 2 != 0) {
    for (u32 table = last + 1; table < tide_tables; ++table) ++shared.run_starts[table];
    ++runs;
  }
  shared.run_starts[tide_tables] = runs;
}

// Gives each part of each row its place in the lists; `next` is where each table's list goes on.
INLINE void place_stretch(const TideSection& s, u32 first, u32 stop, u32 chunks, u32* next, u32 lane) {
  for (u32 chunk = first; chunk < stop; ++chunk) {
    const u32 pass = chunk / chunks, row = chunk % chunks * chunk_rows + lane / tide_parts, part = lane % tide_parts;
    const Taken taken = taken_of(s, pass, row, part);
    u32 before[3] = {0, 0, 0};
    bool is_last = true;
    for (u32 other = 0; other < warp_lanes; ++other) {
      const bool is_same = shuffle(taken.table, other) == taken.table;
#pragma unroll
      for (u32 i = 0; i < 3; ++i) {
        const u32 count = shuffle(taken.counts[i], other);
        if (is_same && other < lane) before[i] += count;
      }
      is_last = is_last && !(is_same && other > lane);
    }
    const u32 place = cursor_place(s, s.planes - 1 - pass / 2, row, part);
#pragma unroll
    for (u32 i = 0; i < 3; ++i) {
      if (i >= taken.lists) continue;
      before[i] += next[taken.table + i];
      s.cursors[place + i] = before[i];
    }
    __syncwarp();
    // Whoever is the last to take from a list in this chunk says where it goes on.
#pragma unroll
    for (u32 i = 0; i < 3; ++i) {
      if (is_last && i < taken.lists) next[taken.table + i] = before[i] + taken.counts[i];
    }
    __syncwarp();
  }
}

// A block of 256 threads for each section.
KERNEL tide_place(TideListsArgs args) {
  __shared__ PlaceShared shared;
  const u32 lane = lane_of_warp(), warp = warp_of_block();
  for (u64 i = blockIdx.x; i < args.section_count; i += gridDim.x) {
    const TideSection& s = args.sections[i];
    const u32 chunks = (s.rows + chunk_rows - 1) / chunk_rows, all = 2 * s.planes * chunks;
    const u32 first = static_cast<u32>(u64{all} * warp / place_warps), stop = static_cast<u32>(u64{all} * (warp + 1) / place_warps);
    for (u32 table = lane; table < tide_tables; table += warp_lanes) shared.counts[warp][table] = 0;
    __syncwarp();
    count_stretch(s, first, stop, chunks, shared.counts[warp], lane);
    __syncthreads();
    if (threadIdx.x < tide_tables) {
      u32 total = 0;
      for (u32 other = 0; other < place_warps; ++other) {
        const u32 count = shared.counts[other][threadIdx.x];
        shared.counts[other][threadIdx.x] = total;
        total += count;
      }
      shared.totals[threadIdx.x] = total;
    }
    __syncthreads();
    if (threadIdx.x == 0) lay_runs(shared);
    __syncthreads();
    for (u32 table = lane; table < tide_tables; table += warp_lanes) {
      shared.counts[warp][table] += shared.run_starts[table] * run_symbols;
    }
    if (threadIdx.x <= tide_tables) s.run_starts[threadIdx.x] = shared.run_starts[threadIdx.x];
    if (threadIdx.x == 0 && u64{shared.run_starts[tide_tables]} * run_symbols > s.items_max) *s.status = 1;
    __syncwarp();
    place_stretch(s, first, stop, chunks, shared.counts[warp], lane);
    __syncthreads();
  }
}

// Runs [first, stop) of one stream: each is a step of the warp.
INLINE bool decode_runs(const TideSection& s, const u32* tables, u32 stream, u32 first, u32 stop, u32 lane) {
  const u32 bytes = s.stream_bytes[stream], escape_count = s.escape_counts[stream];
  if (first == stop) return bytes == 0 && escape_count == 0;
  u32 state, escapes_taken = 0;
  RansWords words;
  if (!rans_open(s.streams[stream], bytes, lane, state, words)) return false;
  const i16* escapes = s.escapes[stream];
  i16* items = s.items + lane;
  for (u32 table = 0, run = first; run < stop;) {
    while (s.run_starts[table + 1] <= run) ++table;
    const u32 table_stop = smaller(s.run_starts[table + 1], stop);
    const RansLane buckets = load_lane(tables, table, lane);
    const i32 centre = table < tide_tops ? top_centre : 1;
    // Only tables that can code the escape are asked for it.
    const bool has_escape = (shuffle(buckets.own, rans_escape) >> 20) != 0;
    i16* to = items + u64{run} * run_symbols;
    const auto put = [&](bool asks) {
      const u32 symbol = rans_step(state, buckets, words, lane, true) % rans_symbols;
      i16 item = static_cast<i16>(static_cast<i32>(symbol) - centre);
      if (asks) {
        const u32 mask = ballot(symbol == rans_escape), rank = escapes_taken + count_bits(mask & lanes_below(lane));
        if (symbol == rans_escape && rank < escape_count) item = escapes[rank];
        escapes_taken += count_bits(mask);
      }
      *to = item;
      to += run_symbols;
    };
    if (has_escape) {
      for (; run < table_stop; ++run) put(true);
    } else {
#pragma unroll 4
      for (; run < table_stop; ++run) put(false);
    }
  }
  return rans_is_whole(state, words) && escapes_taken == escape_count;
}

KERNEL tide_decode(TideListsArgs args) {
  const u32 lane = lane_of_warp();
  for (u64 i = first_job(); i < 2 * args.section_count; i += job_stride()) {
    const TideSection& s = args.sections[i / 2];
    if (any_lane(*s.status != 0)) continue;
    const u32 half = s.run_starts[tide_tables] / 2, stream = static_cast<u32>(i % 2);
    const bool is_good = decode_runs(s, args.tables, stream, stream * half, (stream + 1) * half, lane);
    if (lane == 0 && !is_good) *s.status = 1;
  }
}

INLINE u32 magnitude_class(i32 value) { return value == 0 ? 0 : value == 1 || value == -1 ? 1 : 2; }

// A row's values in a base: its top value, then the digits of finer planes.
INLINE i16 base_value(const TideSection& s, u32 row, u32 part, u32 offset, i32 thirds) {
  i16 value = s.items[s.cursors[cursor_place(s, thirds, row, part)] + offset];
  for (i32 third = thirds - 1; third >= 0; --third) {
    value = static_cast<i16>(3 * value + s.items[s.cursors[cursor_place(s, third, row, part)] + offset]);
  }
  return value;
}

INLINE void deal_part(const TideSection& s, u32 row, u32 part, bool is_digit, i32 thirds, u32 lane) {
  const u32 start = part_start(part, s.tokens), stop = part_start(part + 1, s.tokens);
  i16* values = s.values + u64{row} * s.tokens;
  const i16* items = s.items;
  u32 next[3] = {0, 0, 0}, zeros = 0, ones = 0;
  if (s.refinement != 0) {
#pragma unroll
    for (u32 i = 0; i < 3; ++i) next[i] = s.cursors[cursor_place(s, 0, row, part) + i];
  }
  for (u32 first = start; first < stop; first += warp_lanes) {
    const u32 token = first + lane;
    const bool is_active = token < stop;
    i16 value = 0;
    if (is_digit) {
      value = is_active ? values[token] : i16{0};
      const u32 context = magnitude_class(value);
      u32 place = 0;
#pragma unroll
      for (u32 i = 0; i < 3; ++i) {
        const u32 mask = ballot(is_active && context == i);
        if (context == i) place = next[i] + count_bits(mask & lanes_below(lane));
        next[i] += count_bits(mask);
      }
      const i32 digit = is_active ? items[place] : 0;
      value = static_cast<i16>(3 * value + (value < 0 ? -digit : digit));
    } else if (is_active) {
      value = s.refinement != 0 ? items[next[0] + token - start] : base_value(s, row, part, token - start, thirds);
    }
    if (is_active) values[token] = value;
    zeros += count_bits(ballot(is_active && value == 0));
    ones += count_bits(ballot(is_active && magnitude_class(value) == 1));
  }
  if (lane == 0) s.tallies[row * tide_parts + part] = zeros | ones << 16;
}

// A warp for each row.
KERNEL tide_deal(TideListsArgs args) {
  const u32 lane = lane_of_warp();
  for (u64 i = first_job(); i < args.section_count * args.rows_max; i += job_stride()) {
    const TideSection& s = args.sections[i / args.rows_max];
    const u32 row = static_cast<u32>(i % args.rows_max);
    if (row >= s.rows || any_lane(*s.status != 0)) continue;
    const i32 scale = s.scales[row], units = section_units(s);
    if (!enters(scale, units)) continue;
    const bool is_digit = s.refinement != 0 && enters(scale, units + tide_third);
    const i32 thirds = thirds_of(scale, s.base_units);
    for (u32 part = 0; part < tide_parts; ++part) deal_part(s, row, part, is_digit, thirds, lane);
  }
}
