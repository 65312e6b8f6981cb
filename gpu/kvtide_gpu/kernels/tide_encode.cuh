// Coefficients of the codec tide to streams: loudness, levels, lists, rANS.
#pragma once

#include "tide_lists.cuh"

constexpr u32 encode_tokens_max = 1024;

// A range of a block, coefficients in final steps.
struct TideRange {
  const i16* coefficients;  // (rows, tokens), in order of tokens
  const u32* apart;         // (tokens)
  const i32* loud_rows;     // the row of each column that loudness is summed over, -1: none; sixteen of -2 end a group
  const float* weights;     // of each column
  u8* parts;                // (tokens)
  i32* gains;               // (parts)
  u16* places;              // (tokens): the token at each place in coded order
  i16* levels;              // (refinements + 1, rows, tokens), coarsest first, tokens in coded order
  u32* tallies;             // (refinements + 1, rows, parts)
  i64* totals;              // (rows, 2): sums of a row's steps and of their squares
  u32 rows, tokens, refinements, loud_count;
};
static_assert(sizeof(TideRange) == 96);

struct TideRangeArgs {
  const TideRange* ranges;
  u64 range_count;
  u64 rows_max;
};

constexpr u32 loud_lanes = 16;
constexpr i32 end_of_group = -2;

// Sums go by sixteen places and then in order, group by group, as on the processor.
INLINE float loudness_of(const TideRange& r, u32 token) {
  float loud = 0.0f, sums[loud_lanes] = {};
  if (r.apart[token] != 0) return loud;
  for (u32 first = 0; first < r.loud_count; first += loud_lanes) {
    const bool is_end = r.loud_rows[first] == end_of_group;
#pragma unroll
    for (u32 i = 0; i < loud_lanes; ++i) {
      const i32 row = r.loud_rows[first + i];
      if (row >= 0) {
        const i32 value = r.coefficients[static_cast<u64>(row) * r.tokens + token];
        sums[i] += static_cast<float>(value < 0 ? -value : value) * r.weights[first + i];
      }
      if (is_end) {
        loud += sums[i];
        sums[i] = 0.0f;
      }
    }
  }
  return loud;
}

// Sorts tokens by how large their coefficients are, and cuts them into parts. A block for each range.
KERNEL tide_loudness(TideRangeArgs args) {
  __shared__ float loud[encode_tokens_max];
  __shared__ u8 parts[encode_tokens_max];
  for (u64 i = blockIdx.x; i < args.range_count; i += gridDim.x) {
    const TideRange& r = args.ranges[i];
    __syncthreads();
    for (u32 token = threadIdx.x; token < r.tokens; token += blockDim.x) {
      loud[token] = loudness_of(r, token);
    }
    __syncthreads();
    for (u32 token = threadIdx.x; token < r.tokens; token += blockDim.x) {
      u32 rank = 0;
      for (u32 other = 0; other < r.tokens; ++other) {
        rank += loud[other] < loud[token] || (loud[other] == loud[token] && other < token);
      }
      parts[token] = static_cast<u8>(part_of(rank, r.tokens));
      r.parts[token] = parts[token];
    }
    __syncthreads();
    for (u32 token = threadIdx.x; token < r.tokens; token += blockDim.x) {
      u32 place = part_start(parts[token], r.tokens);
      for (u32 other = 0; other < token; ++other) place += parts[other] == parts[token];
      r.places[place] = static_cast<u16>(token);
    }
    if (threadIdx.x < tide_parts) {
      double sum = 0.0;
      for (u32 token = 0; token < r.tokens; ++token) sum += parts[token] == threadIdx.x ? static_cast<double>(loud[token]) : 0.0;
      const u32 count = part_start(threadIdx.x + 1, r.tokens) - part_start(threadIdx.x, r.tokens);
      const double mean = count == 0 ? 1.0 : static_cast<double>(static_cast<float>(sum / count));
      r.gains[threadIdx.x] = clipped(static_cast<i32>(rint(12.0 * log2(mean > 1e-9 ? mean : 1e-9))), -60, 60);
    }
  }
}

// A row at all steps, and its tallies: a warp for each.
KERNEL tide_levels(TideRangeArgs args) {
  const u32 lane = lane_of_warp();
  for (u64 i = first_job(); i < args.range_count * args.rows_max; i += job_stride()) {
    const TideRange& r = args.ranges[i / args.rows_max];
    const u32 row = static_cast<u32>(i % args.rows_max);
    if (row >= r.rows) continue;
    // Of a lane; steps are 2,000 at most.
    i32 sum = 0;
    u32 squares = 0;
    for (u32 part = 0; part < tide_parts; ++part) {
      const u32 start = part_start(part, r.tokens), stop = part_start(part + 1, r.tokens);
      for (u32 level = r.refinements + 1; level-- > 0;) {
        u32 zeros = 0, ones = 0;
        i16* to = r.levels + (u64{level} * r.rows + row) * r.tokens;
        for (u32 first = start; first < stop; first += warp_lanes) {
          const u32 place = first + lane;
          const bool is_active = place < stop;
          i32 value = 0;
          if (is_active && level == r.refinements) {
            const u32 token = r.places[place];
            value = r.apart[token] != 0 ? 0 : r.coefficients[u64{row} * r.tokens + token];
            sum += value;
            squares += static_cast<u32>(value * value);
          } else if (is_active) {
            value = floor_div(to[u64{r.rows} * r.tokens + place] + 1, 3);
          }
          if (is_active) to[place] = static_cast<i16>(value);
          zeros += count_bits(ballot(is_active && value == 0));
          ones += count_bits(ballot(is_active && magnitude_class(value) == 1));
        }
        if (lane == 0) r.tallies[(u64{level} * r.rows + row) * tide_parts + part] = zeros | ones << 16;
      }
    }
    i64 totals[2] = {0, 0};
    for (u32 i = 0; i < warp_lanes; ++i) {
      totals[0] += static_cast<i32>(shuffle(static_cast<u32>(sum), i));
      totals[1] += shuffle(squares, i);
    }
    if (lane == 0) {
      r.totals[2 * u64{row}] = totals[0];
      r.totals[2 * u64{row} + 1] = totals[1];
    }
  }
}

// A section being encoded: `lists.values` are its level, `lists.tallies` those of the level before, items begin as zeros.
struct TideWriting {
  TideSection lists;
  const i16* parents;  // the level before, none in a base
  u16* words;          // room for items_max words and the states of two streams
  i16* escapes;        // room for items_max
  u32* sizes;          // bytes of the two streams, of their escapes
};
static_assert(sizeof(TideWriting) == 168);

struct TideWriteArgs {
  const TideWriting* sections;
  u64 section_count;
  const u32* codes;  // rANS tables, as RansCode
  u64 rows_max;
};

INLINE void put_part(const TideWriting& w, u32 row, u32 part, bool is_digit, i32 thirds, u32 lane) {
  const TideSection& s = w.lists;
  const u32 start = part_start(part, s.tokens), stop = part_start(part + 1, s.tokens);
  const i16* values = s.values + u64{row} * s.tokens;
  const i16* parents = w.parents + u64{row} * s.tokens;
  i16* items = s.items;
  u32 next[3] = {0, 0, 0};
  if (s.refinement != 0) {
#pragma unroll
    for (u32 i = 0; i < 3; ++i) next[i] = s.cursors[cursor_place(s, 0, row, part) + i];
  }
  for (u32 first = start; first < stop; first += warp_lanes) {
    const u32 token = first + lane;
    const bool is_active = token < stop;
    i32 value = is_active ? values[token] : 0;
    if (is_digit) {
      const i32 parent = is_active ? parents[token] : 0, digit = value - 3 * parent;
      const u32 context = magnitude_class(parent);
      u32 place = 0;
#pragma unroll
      for (u32 i = 0; i < 3; ++i) {
        const u32 mask = ballot(is_active && context == i);
        if (context == i) place = next[i] + count_bits(mask & lanes_below(lane));
        next[i] += count_bits(mask);
      }
      if (is_active) items[place] = static_cast<i16>(parent < 0 ? -digit : digit);
    } else if (is_active && s.refinement != 0) {
      items[next[0] + token - start] = static_cast<i16>(value);
    } else if (is_active) {
      for (i32 third = 0; third < thirds; ++third) {
        const i32 coarser = floor_div(value + 1, 3);
        items[s.cursors[cursor_place(s, third, row, part)] + token - start] = static_cast<i16>(value - 3 * coarser);
        value = coarser;
      }
      items[s.cursors[cursor_place(s, thirds, row, part)] + token - start] = static_cast<i16>(value);
    }
  }
}

// Fills lists: a warp for each row.
KERNEL tide_put(TideWriteArgs args) {
  const u32 lane = lane_of_warp();
  for (u64 i = first_job(); i < args.section_count * args.rows_max; i += job_stride()) {
    const TideWriting& w = args.sections[i / args.rows_max];
    const TideSection& s = w.lists;
    const u32 row = static_cast<u32>(i % args.rows_max);
    if (row >= s.rows) continue;
    const i32 scale = s.scales[row], units = section_units(s);
    if (!enters(scale, units)) continue;
    const bool is_digit = s.refinement != 0 && enters(scale, units + tide_third);
    for (u32 part = 0; part < tide_parts; ++part) put_part(w, row, part, is_digit, thirds_of(scale, s.base_units), lane);
  }
}

// Codes the two streams, from their last items on: a warp for each.
KERNEL tide_encode(TideWriteArgs args) {
  const u32 lane = lane_of_warp();
  for (u64 i = first_job(); i < 2 * args.section_count; i += job_stride()) {
    const TideWriting& w = args.sections[i / 2];
    const TideSection& s = w.lists;
    const u32 stream = static_cast<u32>(i % 2), half = s.run_starts[tide_tables] / 2, first = stream * half;
    u16* words = w.words + u64{stream} * (half * run_symbols + rans_states_words);
    i16* escapes = w.escapes + u64{first} * run_symbols;
    u32 state = rans_state_min, room = half * run_symbols, next = room + rans_states_words, escapes_left = room;
    bool is_good = true;
    u32 table = tide_tables;
    for (u32 run = first + half; is_good && run > first;) {
      while (s.run_starts[table] >= run) --table;
      const RansCode codes = load_code(args.codes, table, lane);
      const i32 centre = table < tide_tops ? top_centre : 1;
      const u32 table_start = s.run_starts[table] > first ? s.run_starts[table] : first;
      for (; is_good && run > table_start; --run) {
        const i16 item = s.items[u64{run - 1} * run_symbols + lane];
        const i32 shifted = item + centre;
        const u32 symbol = shifted < 0 || shifted > static_cast<i32>(rans_escape) ? rans_escape : static_cast<u32>(shifted);
        const u32 mask = ballot(symbol == rans_escape);
        if (symbol == rans_escape) escapes[escapes_left - count_bits(mask >> lane)] = item;
        escapes_left -= count_bits(mask);
        is_good = rans_put(state, symbol, codes, words, next, lane, true);
      }
    }
    if (half != 0 && is_good) {
      next -= rans_states_words;
      put_states(words + next, state, lane);
    } else {
      next = room + rans_states_words;
    }
    if (lane == 0) {
      w.sizes[stream] = 2 * (room + rans_states_words - next);
      w.sizes[2 + stream] = 2 * (room - escapes_left);
      if (!is_good) *s.status = 1;
    }
  }
}

struct TidePackArgs {
  const TideWriting* sections;
  u64 section_count;
  const u64* starts;  // (sections, 4): where the two streams and their escapes go, even
  u8* out;
};

// Puts the pieces of sections side by side: a warp for each.
KERNEL tide_pack(TidePackArgs args) {
  const u32 lane = lane_of_warp();
  for (u64 i = first_job(); i < 4 * args.section_count; i += job_stride()) {
    const TideWriting& w = args.sections[i / 4];
    const u32 piece = static_cast<u32>(i % 4), stream = piece % 2, count = w.sizes[piece] / 2;
    const u32 room = w.lists.run_starts[tide_tables] / 2 * run_symbols;
    const u16* from = reinterpret_cast<const u16*>(w.escapes) + u64{stream + 1} * room - count;
    if (piece < 2) from = w.words + u64{stream + 1} * (room + rans_states_words) - count;
    u16* to = reinterpret_cast<u16*>(args.out + args.starts[i]);
    for (u32 k = lane; k < count; k += warp_lanes) to[k] = from[k];
  }
}
