// Levels along a trellis (docs/codec.md, "Levels along a trellis"): the cheapest path, and lists that a path's states choose.
//
// Everything is in an unnamed namespace on purpose, as in rans_driver.hpp: each instruction set compiles its own copy.
#pragma once

#include <utility>
#include <vector>

#include "tide_lists.hpp"

namespace kvtide {
namespace {

#if defined(__AVX512BW__) || defined(KVTIDE_SIMDE)
constexpr std::size_t word_lanes = 32;
#elif defined(__AVX2__)
constexpr std::size_t word_lanes = 16;
#else
constexpr std::size_t word_lanes = 8;
#endif
// Signed ones are compared, the others wrap.
using Words [[gnu::vector_size(2 * word_lanes)]] = std::int16_t;
using Wrapping [[gnu::vector_size(2 * word_lanes)]] = std::uint16_t;
using Lookup = TidePrices;

inline Words as_words(Wrapping words) { return reinterpret_cast<Words&>(words); }
inline Wrapping as_wrapping(Words words) { return reinterpret_cast<Wrapping&>(words); }
template <class Number>
Words all(Number value) {
  return Words{} + static_cast<std::int16_t>(value);
}

// Some leading words; the others are 0.
inline Words load_words(const std::int16_t* from, std::size_t count) {
  Words found{};
  if (count == word_lanes) {
    std::memcpy(&found, from, sizeof found);
  } else {
    std::memcpy(&found, from, count * sizeof *from);
  }
  return found;
}

inline void store_words(Words words, std::size_t count, std::int16_t* to) {
  if (count == word_lanes) {
    std::memcpy(to, &words, sizeof words);
  } else {
    std::memcpy(to, &words, count * sizeof *to);
  }
}

// The state after a level: even levels take the first, odd ones the second. A state's lowest bit is its quantiser.
constexpr std::size_t trellis_states = 8;
constexpr std::uint8_t next_states[trellis_states][2] = {{0, 1}, {3, 2}, {5, 4}, {6, 7}, {1, 0}, {2, 3}, {4, 5}, {7, 6}};

struct Arrival {
  std::uint8_t from, parity;
};

// The two ways into each state.
constexpr auto arrivals = [] {
  std::array<std::array<Arrival, 2>, trellis_states> found{};
  std::array<std::size_t, trellis_states> count{};
  for (std::uint8_t from = 0; from < trellis_states; ++from) {
    for (std::uint8_t parity = 0; parity < 2; ++parity) {
      const std::uint8_t to = next_states[from][parity];
      found[to][count[to]++] = {from, parity};
    }
  }
  return found;
}();

alignas(64) constexpr Lookup next_of = [] {
  Lookup found{};
  for (std::size_t i = 0; i < 2 * trellis_states; ++i) found[i] = next_states[i / 2][i % 2];
  return found;
}();

// What instruction sets without one instruction for it take.
struct LaneByLane {
  // The entry that each lane names.
  static Words look_up(const Lookup& table, Words index) {
    std::int16_t found[word_lanes], at[word_lanes];
    std::memcpy(at, &index, sizeof index);
    for (std::size_t i = 0; i < word_lanes; ++i) found[i] = table[static_cast<std::size_t>(at[i])];
    Words out;
    std::memcpy(&out, found, sizeof out);
    return out;
  }

  // Each lane takes the next item of the list that it names; one that names none, the last number, takes 0.
  template <std::size_t count>
  static Words take_words(std::array<const std::int16_t*, count>& lists, Words which) {
    std::int16_t found[word_lanes], named[word_lanes];
    std::memcpy(named, &which, sizeof which);
    for (std::size_t i = 0; i < word_lanes; ++i) {
      const auto list = static_cast<std::size_t>(named[i]);
      found[i] = list == count ? std::int16_t{0} : *lists[list]++;
    }
    Words out;
    std::memcpy(&out, found, sizeof out);
    return out;
  }

  // The other way.
  template <std::size_t count>
  static void put_words(Words items, std::array<std::int16_t*, count>& lists, Words which) {
    std::int16_t given[word_lanes], named[word_lanes];
    std::memcpy(given, &items, sizeof items);
    std::memcpy(named, &which, sizeof which);
    for (std::size_t i = 0; i < word_lanes; ++i) {
      const auto list = static_cast<std::size_t>(named[i]);
      if (list != count) *lists[list]++ = given[i];
    }
  }

  // How many lanes name a list.
  static std::size_t count_words(Words which, std::size_t list) {
    const Words is_here = which == all(static_cast<int>(list));
    std::int16_t lanes[word_lanes];
    std::memcpy(lanes, &is_here, sizeof is_here);
    int found = 0;
    for (const std::int16_t lane : lanes) found -= lane;
    return static_cast<std::size_t>(found);
  }
};

inline Words magnitude_of(Words values) { return values < 0 ? as_words(-as_wrapping(values)) : values; }
inline Words with_sign_of(Words signs, Words magnitudes) { return signs < 0 ? as_words(-as_wrapping(magnitudes)) : magnitudes; }

// The list of a context's digit: by the magnitude of the value so far, then by quantiser.
constexpr std::size_t state_contexts = 2 * tide_contexts;
inline Words context_list(Words parents, Words quantiser) {
  const Words is_zero = parents == 0, is_one = magnitude_of(parents) == 1;
  return (is_zero ? all(0) : is_one ? all(1) : all(2)) + (quantiser == 0 ? all(0) : all(static_cast<int>(tide_contexts)));
}

// Where levels stand, in half steps: even ones in quantiser 0, zero and odd ones in quantiser 1.
inline Words half_steps(Words levels, Words quantiser) {
  const Words sign = levels > 0 ? all(1) : levels < 0 ? all(-1) : all(0);
  const Words less = quantiser == 0 ? all(0) : sign;
  return as_words(as_wrapping(levels) + as_wrapping(levels) - as_wrapping(less));
}

// Walks all rows in order, each token along its own path. `visit(mode, table, each_chunk)` is called for each part of a row, and calls
// `each_chunk(level_of)`, which goes through its tokens: `level_of(first value, tokens, quantisers)` returns levels. False ends the walk.
template <class Isa, class Visit>
bool walk_states(const TideStates& job, Visit visit) {
  std::vector<std::int16_t> states(job.tokens);
  for (std::size_t row = 0; row < job.modes.size(); ++row) {
    for (std::size_t part = 0; part < tide_parts; ++part) {
      const std::size_t start = tide_part_start(part, job.tokens), stop = tide_part_start(part + 1, job.tokens);
      const bool goes_on = visit(job.modes[row], job.tables[row * tide_parts + part], [&](auto level_of) {
        for (std::size_t token = start; token < stop; token += word_lanes) {
          const std::size_t count = std::min(word_lanes, stop - token);
          const Words state = load_words(states.data() + token, count), quantiser = state & all(1);
          const Words level = level_of(row * job.tokens + token, count, quantiser);
          store_words(Isa::look_up(next_of, state + state + (level & all(1))), count, states.data() + token);
        }
      });
      if (!goes_on) return false;
    }
  }
  return true;
}

// `which`, but for lanes that hold no token: these name no list.
inline Words only_leading(Words which, std::size_t count, std::size_t lists) {
  if (count == word_lanes) return which;
  Words lane;
  for (std::size_t i = 0; i < word_lanes; ++i) lane[i] = static_cast<std::int16_t>(i);
  return lane < all(static_cast<int>(count)) ? which : all(static_cast<int>(lists));
}

// The lists of one part of a row, from its table: by context, and those of quantiser 1 further on.
template <std::size_t count>
std::array<std::size_t, count> state_tables(const TideStates& job, std::size_t table) {
  std::array<std::size_t, count> found;
  for (std::size_t i = 0; i < count; ++i) found[i] = table + i % (count / 2) + (i < count / 2 ? 0 : job.twins[count == 2 ? 0 : 1]);
  return found;
}

template <std::size_t count, class Item>
std::array<Item*, count> open_lists(const std::array<std::size_t, count>& tables, const TideLists<Item>& lists) {
  std::array<Item*, count> found;
  for (std::size_t i = 0; i < count; ++i) found[i] = lists.items.data() + lists.cursors[tables[i]];
  return found;
}

// False if a list gave more than it has.
template <std::size_t count, class Item>
bool close_lists(const std::array<std::size_t, count>& tables, const std::array<Item*, count>& next, const TideLists<Item>& lists) {
  for (std::size_t i = 0; i < count; ++i) {
    lists.cursors[tables[i]] = next[i] - lists.items.data();
    if (lists.cursors[tables[i]] > lists.stops[tables[i]]) return false;
  }
  return true;
}

// A chunk may take tide_slack items beyond its list's end before that is noticed: vectors have no more lanes.
template <std::size_t count>
bool has_all(const std::array<std::size_t, count>& tables, const std::array<const std::int16_t*, count>& next,
             const TideLists<const std::int16_t>& lists) {
  bool found = true;
  for (std::size_t i = 0; i < count; ++i) found = found && next[i] - lists.items.data() <= lists.stops[tables[i]];
  return found;
}

static_assert(word_lanes <= tide_slack);

template <class Item>
bool are_lists_inside(const TideLists<Item>& lists) {
  for (std::size_t i = 0; i < lists.cursors.size(); ++i) {
    if (lists.cursors[i] < 0 || lists.cursors[i] > lists.stops[i] || lists.stops[i] > static_cast<std::int64_t>(lists.items.size())) return false;
  }
  return true;
}

template <class Isa>
bool take_states(const TideStates& job, const TideLists<const std::int16_t>& lists) {
  if (!are_lists_inside(lists)) return false;
  return walk_states<Isa>(job, [&](TideMode mode, std::size_t table, auto each_chunk) {
    if (mode == TideMode::digit) {
      each_chunk([&](std::size_t at, std::size_t count, Words quantiser) {
        const Words level = load_words(job.values.data() + at, count);
        store_words(half_steps(level, quantiser), count, job.values.data() + at);
        return level;
      });
      return true;
    }
    const auto by_list = [&]<std::size_t lists_count>(auto level_of) {
      const auto tables = state_tables<lists_count>(job, table);
      auto next = open_lists(tables, lists);
      bool fits = true;
      each_chunk([&](std::size_t at, std::size_t count, Words quantiser) {
        if (!fits) return Words{};
        std::int16_t* values = job.values.data() + at;
        const Words level = level_of(load_words(values, count), count, quantiser, next);
        fits = has_all(tables, next, lists);
        store_words(half_steps(level, quantiser), count, values);
        return level;
      });
      return close_lists(tables, next, lists) && fits;
    };
    if (mode == TideMode::top) {
      return by_list.template operator()<2>([](Words, std::size_t count, Words quantiser, auto& next) {
        return Isa::template take_words<2>(next, only_leading(quantiser, count, 2));
      });
    }
    return by_list.template operator()<state_contexts>([](Words parents, std::size_t count, Words quantiser, auto& next) {
      const Words which = only_leading(context_list(parents, quantiser), count, state_contexts);
      const Words digits = with_sign_of(parents, Isa::template take_words<state_contexts>(next, which));
      const Wrapping parent = as_wrapping(parents);
      return as_words(parent + parent + parent + as_wrapping(digits));
    });
  });
}

// What rows' levels put into lists: `open<lists>(their tables)` for each part of a row, whose result's `give(items, the list that each lane
// names)` is called for each chunk, then its `close`. False from one of them ends the walk.
template <class Isa, class Open>
bool give_states(const TideStates& job, std::span<const std::int16_t> parents, Open open) {
  return walk_states<Isa>(job, [&](TideMode mode, std::size_t table, auto each_chunk) {
    const auto by_list = [&]<std::size_t lists_count>(auto items_of) {
      auto part = open(state_tables<lists_count>(job, table));
      bool fits = true;
      each_chunk([&](std::size_t at, std::size_t count, Words quantiser) {
        const Words level = load_words(job.values.data() + at, count);
        const auto [items, which] = items_of(level, at, count, quantiser);
        fits = fits && part.give(items, only_leading(which, count, lists_count));
        return level;
      });
      part.close();
      return fits;
    };
    if (mode == TideMode::top) {
      return by_list.template operator()<2>([](Words level, std::size_t, std::size_t, Words quantiser) { return std::pair(level, quantiser); });
    }
    if (mode == TideMode::context) {
      return by_list.template operator()<state_contexts>([&](Words level, std::size_t at, std::size_t count, Words quantiser) {
        const Words before = load_words(parents.data() + at, count);
        const Wrapping parent = as_wrapping(before);
        const Words digits = with_sign_of(before, as_words(as_wrapping(level) - parent - parent - parent));
        return std::pair(digits, context_list(before, quantiser));
      });
    }
    each_chunk([&](std::size_t at, std::size_t count, Words) { return load_words(job.values.data() + at, count); });
    return true;
  });
}

template <class Isa, std::size_t count>
struct CountedPart {
  std::array<std::size_t, count> tables;
  std::span<std::int64_t> counts;
  std::array<std::size_t, count> found = {};

  bool give(Words, Words which) {
    for (std::size_t i = 0; i < count; ++i) found[i] += Isa::count_words(which, i);
    return true;
  }
  void close() {
    for (std::size_t i = 0; i < count; ++i) counts[tables[i]] += static_cast<std::int64_t>(found[i]);
  }
};

template <class Isa>
void count_states(const TideStates& job, std::span<const std::int16_t> parents, std::span<std::int64_t> counts) {
  give_states<Isa>(job, parents, [&]<std::size_t count>(const std::array<std::size_t, count>& tables) {
    return CountedPart<Isa, count>{tables, counts};
  });
}

template <class Isa, std::size_t count>
struct PutPart {
  std::array<std::size_t, count> tables;
  const TideLists<std::int16_t>& lists;
  std::array<std::int16_t*, count> next = open_lists(tables, lists);

  // False, with nothing put, if a list has too little room.
  bool give(Words items, Words which) {
    for (std::size_t i = 0; i < count; ++i) {
      const std::int64_t room = lists.stops[tables[i]] - (next[i] - lists.items.data());
      if (room < static_cast<std::int64_t>(word_lanes) && static_cast<std::int64_t>(Isa::count_words(which, i)) > room) return false;
    }
    Isa::template put_words<count>(items, next, which);
    return true;
  }
  void close() { close_lists(tables, next, lists); }
};

template <class Isa>
bool put_states(const TideStates& job, std::span<const std::int16_t> parents, const TideLists<std::int16_t>& lists) {
  return are_lists_inside(lists) && give_states<Isa>(job, parents, [&]<std::size_t count>(const std::array<std::size_t, count>& tables) {
           return PutPart<Isa, count>{tables, lists};
         });
}

// Magnitudes of one parity, the nearest one and the one below it. magnitude: in 16ths of a step, below 2^15 - 32.
inline Words nearest_level(Words magnitude, Words quantiser, Words parity) {
  const Words above = magnitude + quantiser * 8 - parity * 16 + 16;
  return (above >> 5) * 2 + parity;
}
inline Words level_below(Words level, Words parity) {
  const Words below = level - 2;
  return below < parity ? parity : below;
}

// What levels cost beside the squares of their distances, by quantiser; 16 entries for each parity, by half of the level: the rate of a
// level, and how much higher that of the one below it is.
struct LevelRates {
  std::array<Lookup, 2> rates, rises;

  explicit LevelRates(const TidePrices& prices) {
    constexpr int known = tide_priced_levels - 1;
    for (int i = 0; i < 2 * 2 * tide_priced_levels; ++i) {
      const int quantiser = i / (2 * tide_priced_levels), entry = i % (2 * tide_priced_levels), half = entry % tide_priced_levels;
      const int level = 2 * half + entry / tide_priced_levels;
      const auto rate = [&](int of) { return prices[static_cast<std::size_t>(quantiser * tide_priced_levels + std::min(of, known))]; };
      const auto at = static_cast<std::size_t>(entry), which = static_cast<std::size_t>(quantiser);
      rates[which][at] = rate(level);
      rises[which][at] = static_cast<std::int16_t>(half == 0 ? 0 : rate(level - 2) - rate(level));
    }
  }
};

// Of the levels of one quantiser and parity, what the nearest one costs, the square of its distance and its rate, and how much more the
// one below it does: that is not below zero where there is none.
struct LevelCosts {
  Words nearest, more_below;
};
template <class Isa>
LevelCosts level_costs(Words magnitude, int quantiser, int parity, const LevelRates& rates) {
  const auto which = static_cast<std::size_t>(quantiser);
  // Levels of a parity stand 32 sixteenths apart: by `past` - 16 the nearest one is off, and the one below it by `past` + 16.
  const Words above = magnitude + static_cast<std::int16_t>(16 - 16 * parity + 8 * quantiser);
  const Words half = above >> 5, past = above & all(31);
  const Words entry = (half < all(tide_priced_levels - 1) ? half : all(tide_priced_levels - 1)) + static_cast<std::int16_t>(parity * tide_priced_levels);
  Words off = past - 16, more = past * 64 + Isa::look_up(rates.rises[which], entry);
  if (quantiser == 1 && parity == 0) {
    // Zero stands for 0, and not for half a step below.
    off = half == 0 ? magnitude : off;
    more = half == 1 ? more - past * 16 - 192 : more;
  }
  return {off * off + Isa::look_up(rates.rates[which], entry), more};
}

// Above what costs differ by between states, and low enough that nothing overflows: a row adds 256 and a rate at most.
constexpr int no_way = 12000;
// After so many rows the least cost is taken from all.
constexpr std::size_t levelled_rows = 4;
// Rows stand too far apart for processors to fetch them ahead by themselves.
constexpr std::size_t ahead_rows = 16;
static_assert(2 * no_way + static_cast<int>(levelled_rows) * (256 + tide_rate_max) < 32768);

// One vector of tokens along all rows. decisions: a word for each row and lane: which way each state was come to, then whether the
// level of each quantiser and parity is the one below the nearest.
template <class Isa>
class TrellisPath {
 public:
  TrellisPath(const TideTrellis& job, std::size_t rows) : job_(job), rates_(job.rates.begin(), job.rates.end()), decisions_(rows) {}

  void run(std::size_t token, std::size_t count, std::size_t part) {
    for (std::size_t state = 0; state < trellis_states; ++state) costs_[state] = all(state == 0 ? 0 : no_way);
    for (std::size_t row = 0; row < decisions_.size(); ++row) {
      __builtin_prefetch(job_.exact.data() + std::min(row + ahead_rows, decisions_.size() - 1) * job_.tokens + token);
      const Words exact = load_words(job_.exact.data() + row * job_.tokens + token, count);
      go_on(magnitude_of(exact), rates_[job_.classes[row * tide_parts + part]], decisions_[row]);
      if (row % levelled_rows == 0) take_least();
    }
    Words state{}, least = costs_[0];
    for (std::size_t each = 1; each < trellis_states; ++each) {
      const Words is_less = costs_[each] < least;
      state = is_less ? all(static_cast<int>(each)) : state;
      least = is_less ? costs_[each] : least;
    }
    for (std::size_t row = decisions_.size(); row-- > 0;) {
      const std::size_t at = row * job_.tokens + token;
      __builtin_prefetch(job_.levels.data() + at - std::min(row, ahead_rows) * job_.tokens, 1);
      store_words(go_back(load_words(job_.exact.data() + at, count), decisions_[row], state), count, job_.levels.data() + at);
    }
  }

 private:
  void go_on(Words magnitude, const LevelRates& rates, Words& decision) {
    decision = Words{};
    Words added[2][2];
    for (int quantiser = 0; quantiser < 2; ++quantiser) {
      for (int parity = 0; parity < 2; ++parity) {
        const auto [nearest, more_below] = level_costs<Isa>(magnitude, quantiser, parity, rates);
        const Words is_below = more_below < 0;
        added[quantiser][parity] = is_below ? nearest + more_below : nearest;
        decision |= is_below & all(1 << (trellis_states + static_cast<std::size_t>(2 * quantiser + parity)));
      }
    }
    Words after[trellis_states];
    for (std::size_t state = 0; state < trellis_states; ++state) {
      const auto [first, second] = arrivals[state];
      const Words way = costs_[first.from] + added[first.from % 2][first.parity];
      const Words other = costs_[second.from] + added[second.from % 2][second.parity];
      const Words is_second = other < way;
      after[state] = is_second ? other : way;
      decision |= is_second & all(1 << state);
    }
    std::copy(after, after + trellis_states, costs_);
  }

  void take_least() {
    Words least = costs_[0];
    for (const Words& each : costs_) least = each < least ? each : least;
    for (Words& each : costs_) each -= least;
  }

  // The level of a row, and the state before it.
  static Words go_back(Words exact, Words decision, Words& state) {
    const Words is_second = (decision & Isa::look_up(bit_of, state)) != 0;
    const Words came = Isa::look_up(came_from, state * 2 - is_second);
    const Words parity = came & 1;
    state = came >> 1;
    const Words quantiser = state & 1;
    const Words is_below = (decision & Isa::look_up(bit_of, quantiser * 2 + parity + all(trellis_states))) != 0;
    const Words near = nearest_level(magnitude_of(exact), quantiser, parity);
    return with_sign_of(exact, is_below ? level_below(near, parity) : near);
  }

  alignas(64) static constexpr Lookup bit_of = [] {
    Lookup found{};
    for (std::size_t i = 0; i < trellis_states + 4; ++i) found[i] = static_cast<std::int16_t>(1 << i);
    return found;
  }();
  // By state and way: twice the state before, and the level's parity.
  alignas(64) static constexpr Lookup came_from = [] {
    Lookup found{};
    for (std::size_t i = 0; i < 2 * trellis_states; ++i) {
      const Arrival& way = arrivals[i / 2][i % 2];
      found[i] = static_cast<std::int16_t>(2 * way.from + way.parity);
    }
    return found;
  }();

  const TideTrellis& job_;
  const std::vector<LevelRates> rates_;  // of each class
  std::vector<Words> decisions_;
  Words costs_[trellis_states];
};

template <class Isa>
void find_path(const TideTrellis& job) {
  TrellisPath<Isa> path(job, job.exact.size() / job.tokens);
  for (std::size_t part = 0; part < tide_parts; ++part) {
    const std::size_t stop = tide_part_start(part + 1, job.tokens);
    for (std::size_t token = tide_part_start(part, job.tokens); token < stop; token += word_lanes) {
      path.run(token, std::min(word_lanes, stop - token), part);
    }
  }
}

}  // namespace
}  // namespace kvtide
