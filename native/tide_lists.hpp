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
using ContextLists = std::array<const std::int16_t*, tide_contexts>;

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
[[maybe_unused]] void take_contexts(std::int16_t* values, std::size_t count, ContextLists& lists) {
  for (std::size_t i = 0; i < count; ++i) {
    const int value = values[i];
    const int digit = *lists[context_of(value)]++;
    values[i] = static_cast<std::int16_t>(3 * value + (value < 0 ? -digit : digit));
  }
}

template <class Item>
bool has_room(const TideLists<Item>& lists, std::size_t table, std::size_t count) {
  return lists.cursors[table] >= 0 && lists.stops[table] - lists.cursors[table] >= static_cast<std::int64_t>(count) &&
         lists.stops[table] <= static_cast<std::int64_t>(lists.items.size());
}

// `contexts` must take no more of a list than there are values of its magnitude; it may read 8 items beyond.
template <class Contexts>
bool take_part_contexts(const TideRows& rows, const TideLists<const std::int16_t>& lists, Contexts contexts, std::size_t table,
                        std::size_t first, std::size_t count) {
  std::int16_t* values = rows.values.data() + first;
  std::size_t zeros = 0, ones = 0;
  for (std::size_t i = 0; i < count; ++i) {
    zeros += values[i] == 0;
    ones += values[i] == 1 || values[i] == -1;
  }
  if (!has_room(lists, table, zeros) || !has_room(lists, table + 1, ones) || !has_room(lists, table + 2, count - zeros - ones)) {
    return false;
  }
  ContextLists next;
  for (std::size_t i = 0; i < tide_contexts; ++i) next[i] = lists.items.data() + lists.cursors[table + i];
  contexts(values, count, next);
  for (std::size_t i = 0; i < tide_contexts; ++i) lists.cursors[table + i] = next[i] - lists.items.data();
  return true;
}

template <class Contexts>
bool take_rows(const TideRows& rows, const TideLists<const std::int16_t>& lists, Contexts contexts) {
  return for_each_part(rows, [&](std::size_t table, std::size_t first, std::size_t count) {
    if (rows.mode == TideMode::context) return take_part_contexts(rows, lists, contexts, table, first, count);
    if (!has_room(lists, table, count)) return false;
    const std::int16_t* from = lists.items.data() + lists.cursors[table];
    std::int16_t* values = rows.values.data() + first;
    for (std::size_t i = 0; i < count; ++i) {
      values[i] = rows.mode == TideMode::top ? from[i] : static_cast<std::int16_t>(3 * values[i] + from[i]);
    }
    lists.cursors[table] += static_cast<std::int64_t>(count);
    return true;
  });
}

// The inverse of taking: parents are the values before it, rows the values after it.
[[maybe_unused]] bool put_rows(const TideRows& rows, std::span<const std::int16_t> parents,
                               const TideLists<std::int16_t>& lists) {
  return for_each_part(rows, [&](std::size_t table, std::size_t first, std::size_t count) {
    const std::int16_t* values = rows.values.data() + first;
    const std::int16_t* before = parents.data() + first;
    if (rows.mode != TideMode::context) {
      if (!has_room(lists, table, count)) return false;
      std::int16_t* to = lists.items.data() + lists.cursors[table];
      const int factor = rows.mode == TideMode::top ? 0 : 3;
      for (std::size_t i = 0; i < count; ++i) to[i] = static_cast<std::int16_t>(values[i] - factor * before[i]);
      lists.cursors[table] += static_cast<std::int64_t>(count);
      return true;
    }
    std::array<std::size_t, tide_contexts> taken = {};
    for (std::size_t i = 0; i < count; ++i) ++taken[context_of(before[i])];
    std::array<std::int16_t*, tide_contexts> next;
    for (std::size_t i = 0; i < tide_contexts; ++i) {
      if (!has_room(lists, table + i, taken[i])) return false;
      next[i] = lists.items.data() + lists.cursors[table + i];
      lists.cursors[table + i] += static_cast<std::int64_t>(taken[i]);
    }
    for (std::size_t i = 0; i < count; ++i) {
      const int parent = before[i], digit = values[i] - 3 * parent;
      *next[context_of(before[i])]++ = static_cast<std::int16_t>(parent < 0 ? -digit : digit);
    }
    return true;
  });
}

}  // namespace
}  // namespace kvtide
