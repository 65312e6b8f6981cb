// Walks rows and lists: what every instruction set shares.
//
// Everything is in an unnamed namespace on purpose, as in rans_driver.hpp: each instruction set compiles its own copy.
#pragma once

#include <algorithm>
#include <cstring>

#include "tide_paths.hpp"

namespace kvtide {
namespace {

// Where the three lists of a part stand.
template <class Item>
using ContextLists = std::array<Item*, tide_contexts>;

// Calls `work(table, first, count)` for each part of each row, values [first, first + count).
template <class Work>
bool for_each_part(const TideRows& rows, Work work) {
  for (std::size_t row = 0; row < rows.which.size(); ++row) {
    for (std::size_t part = 0; part < tide_parts; ++part) {
      const std::size_t start = tide_part_start(part, rows.tokens), stop = tide_part_start(part + 1, rows.tokens);
      if (!work(rows.tables[row * tide_parts + part], rows.which[row] * rows.tokens + start, stop - start)) return false;
    }
  }
  return true;
}

// Which of the three lists has the digit behind a value.
[[maybe_unused]] std::size_t context_of(int value) {
  return static_cast<std::size_t>(std::min(value < 0 ? -value : value, 2));
}

// Three times each value and the digit that its magnitude's list has for it.
[[maybe_unused]] void take_contexts(std::int16_t* values, std::size_t count, ContextLists<const std::int16_t>& lists) {
  for (std::size_t i = 0; i < count; ++i) {
    const int value = values[i];
    const int digit = *lists[context_of(value)]++;
    values[i] = static_cast<std::int16_t>(3 * value + (value < 0 ? -digit : digit));
  }
}

// The inverse: appends what takes each parent to its value to the list of the parent's magnitude.
[[maybe_unused]] void put_contexts(const std::int16_t* values, const std::int16_t* parents, std::size_t count,
                                   ContextLists<std::int16_t>& lists) {
  for (std::size_t i = 0; i < count; ++i) {
    const int parent = parents[i], digit = values[i] - 3 * parent;
    *lists[context_of(parent)]++ = static_cast<std::int16_t>(parent < 0 ? -digit : digit);
  }
}

// How many values each of the three lists has a digit for.
inline std::array<std::size_t, tide_contexts> count_contexts(const std::int16_t* values, std::size_t count) {
  constexpr std::size_t chunk = 32768;  // what sums of 16 bits hold
  std::array<std::size_t, tide_contexts> found = {0, 0, count};
  for (std::size_t first = 0; first < count; first += chunk) {
    std::uint16_t zeros = 0, ones = 0;
    for (std::size_t i = first; i < std::min(count, first + chunk); ++i) {
      const std::int16_t value = values[i];
      zeros = static_cast<std::uint16_t>(zeros + (value == 0));
      ones = static_cast<std::uint16_t>(ones + ((value == 1) | (value == -1)));
    }
    found[0] += zeros;
    found[1] += ones;
    found[2] -= std::size_t{zeros} + ones;
  }
  return found;
}

template <class Item>
bool has_room(const TideLists<Item>& lists, std::size_t table, std::size_t count) {
  return lists.cursors[table] >= 0 && lists.stops[table] - lists.cursors[table] >= static_cast<std::int64_t>(count) &&
         lists.stops[table] <= static_cast<std::int64_t>(lists.items.size());
}

// Where no value is asked. Rows stand in the order of their scales: neighbours mostly have one table, and adding to one number twice in
// a row would wait for itself.
inline void count_parts(const TideRows& rows, std::span<std::int64_t> counts) {
  for (std::size_t part = 0; part < tide_parts; ++part) {
    const std::size_t size = tide_part_start(part + 1, rows.tokens) - tide_part_start(part, rows.tokens);
    for (std::size_t row = 0; row < rows.which.size();) {
      const std::size_t table = rows.tables[row * tide_parts + part], first = row;
      while (row < rows.which.size() && rows.tables[row * tide_parts + part] == table) ++row;
      counts[table] += static_cast<std::int64_t>((row - first) * size);
    }
  }
}

inline void count_rows(const TideRows& rows, std::span<std::int64_t> counts) {
  if (rows.mode != TideMode::context) return count_parts(rows, counts);
  for_each_part(rows, [&](std::size_t table, std::size_t first, std::size_t count) {
    const auto found = count_contexts(rows.values.data() + first, count);
    for (std::size_t i = 0; i < tide_contexts; ++i) counts[table + i] += static_cast<std::int64_t>(found[i]);
    return true;
  });
}

// Where a part's three lists go on; false if one is too short. Values are counted only where a list might be.
template <class Item>
bool open_contexts(const TideLists<Item>& lists, std::size_t table, const std::int16_t* values, std::size_t count,
                   ContextLists<Item>& next) {
  std::array<std::size_t, tide_contexts> found = {count, count, count};
  const auto have_room = [&] {
    bool has_all = true;
    for (std::size_t i = 0; i < tide_contexts; ++i) has_all = has_all && has_room(lists, table + i, found[i]);
    return has_all;
  };
  if (!have_room()) {
    found = count_contexts(values, count);
    if (!have_room()) return false;
  }
  for (std::size_t i = 0; i < tide_contexts; ++i) next[i] = lists.items.data() + lists.cursors[table + i];
  return true;
}

template <class Item>
void close_contexts(const TideLists<Item>& lists, std::size_t table, const ContextLists<Item>& next) {
  for (std::size_t i = 0; i < tide_contexts; ++i) lists.cursors[table + i] = next[i] - lists.items.data();
}

// Parts are short: a call to copy 64 items costs as much as copying them.
inline void copy_items(const std::int16_t* from, std::size_t count, std::int16_t* to) {
  constexpr std::size_t items = 32;
  std::size_t i = 0;
  for (; i + items <= count; i += items) std::memcpy(to + i, from + i, items * sizeof *from);
  if (i != count) std::memcpy(to + i, from + i, (count - i) * sizeof *from);
}

// `Isa::take_contexts` may read tide_slack items beyond what it takes.
template <class Isa>
bool take_rows(const TideRows& rows, const TideLists<const std::int16_t>& lists) {
  return for_each_part(rows, [&](std::size_t table, std::size_t first, std::size_t count) {
    std::int16_t* values = rows.values.data() + first;
    if (rows.mode == TideMode::context) {
      ContextLists<const std::int16_t> next;
      if (!open_contexts(lists, table, values, count, next)) return false;
      Isa::take_contexts(values, count, next);
      close_contexts(lists, table, next);
      return true;
    }
    if (!has_room(lists, table, count)) return false;
    const std::int16_t* from = lists.items.data() + lists.cursors[table];
    lists.cursors[table] += static_cast<std::int64_t>(count);
    if (rows.mode == TideMode::top) {
      copy_items(from, count, values);
      return true;
    }
    for (std::size_t i = 0; i < count; ++i) values[i] = static_cast<std::int16_t>(3 * values[i] + from[i]);
    return true;
  });
}

// The inverse of taking: parents are the values before it, rows the values after it.
template <class Isa>
bool put_rows(const TideRows& rows, std::span<const std::int16_t> parents, const TideLists<std::int16_t>& lists) {
  return for_each_part(rows, [&](std::size_t table, std::size_t first, std::size_t count) {
    const std::int16_t* values = rows.values.data() + first;
    const std::int16_t* before = parents.data() + first;
    if (rows.mode == TideMode::context) {
      ContextLists<std::int16_t> next;
      if (!open_contexts(lists, table, before, count, next)) return false;
      Isa::put_contexts(values, before, count, next);
      close_contexts(lists, table, next);
      return true;
    }
    if (!has_room(lists, table, count)) return false;
    std::int16_t* to = lists.items.data() + lists.cursors[table];
    lists.cursors[table] += static_cast<std::int64_t>(count);
    if (rows.mode == TideMode::top) {
      copy_items(values, count, to);
      return true;
    }
    for (std::size_t i = 0; i < count; ++i) to[i] = static_cast<std::int16_t>(values[i] - 3 * before[i]);
    return true;
  });
}

}  // namespace
}  // namespace kvtide
