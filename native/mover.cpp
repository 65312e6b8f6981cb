#include "mover.hpp"

#include <pthread.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <ctime>
#include <stdexcept>
#include <system_error>
#include <utility>

namespace kvtide {
namespace {

// One call moves no more, so that every socket has its turn.
constexpr std::size_t call_bytes_max = 1 << 20;
constexpr std::size_t call_pieces_max = 64;
constexpr std::size_t events_max = 64;
// No job has it.
constexpr std::uint64_t wake_id = 0;

std::int64_t now_ns() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * std::int64_t{1'000'000'000} + now.tv_nsec;
}

// Calls until no signal interrupts.
template <class Call>
ssize_t uninterrupted(Call call) {
  ssize_t result = 0;
  do {
    result = call();
  } while (result < 0 && errno == EINTR);
  return result;
}

void raise_event(int descriptor) {
  const std::uint64_t one = 1;
  // It fails only where the counter is full, and then it is readable.
  [[maybe_unused]] const ssize_t written = uninterrupted([&] { return write(descriptor, &one, sizeof one); });
}

void clear_event(int descriptor) {
  std::uint64_t count = 0;
  [[maybe_unused]] const ssize_t came = uninterrupted([&] { return read(descriptor, &count, sizeof count); });
}

int checked(int descriptor) {
  if (descriptor < 0) throw std::system_error(errno, std::generic_category(), "can't start the thread that moves bodies");
  return descriptor;
}

// At most `room` bytes from `start` on of memory in pieces, as the kernel takes it.
std::size_t window(const Job& job, std::size_t start, std::size_t room, std::array<iovec, call_pieces_max>& pieces) {
  std::size_t count = 0;
  for (const auto& piece : job.memory) {
    if (start >= piece.size()) {
      start -= piece.size();
      continue;
    }
    const std::size_t size = std::min(piece.size() - start, room);
    pieces[count++] = {piece.data() + start, size};
    start = 0;
    room -= size;
    if (!room || count == call_pieces_max) break;
  }
  return count;
}

// What one call came to.
struct Call {
  std::size_t moved = 0;
  int error = job_done;
  // It did all it was asked for; if not, the next call would most likely do nothing.
  bool is_full = false;
};

ssize_t move_once(const Job& job, std::size_t start, std::size_t count) {
  if (job.direction == Direction::send_file) {
    off_t offset = job.offset + static_cast<off_t>(start);
    return sendfile(job.socket, job.file, &offset, count);
  }
  std::array<iovec, call_pieces_max> pieces;
  msghdr message{};
  message.msg_iov = pieces.data();
  message.msg_iovlen = window(job, start, count, pieces);
  if (job.direction == Direction::receive) return recvmsg(job.socket, &message, MSG_DONTWAIT);
  return sendmsg(job.socket, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
}

// Moves what the socket gives or takes now of bytes [start, stop) of a job.
Call call(const Job& job, std::size_t start, std::size_t stop) {
  std::size_t count = std::min(stop - start, call_bytes_max);
  if (job.slice_bytes) count = std::min(count, job.slice_bytes - start % job.slice_bytes);
  const ssize_t result = uninterrupted([&] { return move_once(job, start, count); });
  if (result > 0) return {static_cast<std::size_t>(result), job_done, static_cast<std::size_t>(result) == count};
  if (result == 0) return {0, job_ended};
  return {0, errno == EAGAIN || errno == EWOULDBLOCK ? job_done : errno};
}

}  // namespace

struct Mover::Running {
  Running(std::uint64_t number, Job&& what) : id(number), job(std::move(what)), size(job.size), moved_ns(now_ns()) {}

  void note(const Call& call);
  bool is_over() const { return error != job_done || moved == size; }
  void set_wake_bytes(std::size_t count);

  const std::uint64_t id;
  const Job job;
  // How far it goes. All below is read and changed under the lock.
  std::size_t size;
  std::size_t moved = 0;
  std::int64_t moved_ns;
  int error = job_done;
  bool is_stepping = false;
  // Somebody waits for the end of the step; there is no other.
  bool is_stopped = false;
  bool is_registered = false;
  // What the socket's SO_RCVLOWAT is.
  std::size_t wake_bytes = 1;
};

void Mover::Running::note(const Call& call) {
  moved += call.moved;
  error = call.error;
  if (call.moved) moved_ns = now_ns();
}

// Asks to be woken for so many bytes, at least one.
void Mover::Running::set_wake_bytes(std::size_t count) {
  if (!job.wake_bytes || count == wake_bytes) return;
  const int value = static_cast<int>(count);
  // Where it can't be set the thread is woken for each segment, which is slower and as right.
  if (setsockopt(job.socket, SOL_SOCKET, SO_RCVLOWAT, &value, sizeof value) == 0) wake_bytes = count;
}

Mover::Owned::~Owned() {
  if (descriptor >= 0) close(descriptor);
}

Mover::Mover() {
  poll_.descriptor = checked(epoll_create1(EPOLL_CLOEXEC));
  wake_.descriptor = checked(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  done_.descriptor = checked(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  epoll_event event{.events = EPOLLIN, .data = {.u64 = wake_id}};
  checked(epoll_ctl(poll_.descriptor, EPOLL_CTL_ADD, wake_.descriptor, &event));
  // Signals are the other threads'.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    thread_ = std::thread(&Mover::run, this);
  } catch (...) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    throw;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  pthread_setname_np(thread_.native_handle(), "kvtide-bodies");
}

Mover::~Mover() {
  {
    const std::lock_guard lock(mutex_);
    is_closing_ = true;
  }
  raise_event(wake_.descriptor);
  thread_.join();
}

Outcome Mover::start(Job job) {
  std::unique_lock lock(mutex_);
  const std::uint64_t id = ++last_id_;
  const auto running = std::make_shared<Running>(id, std::move(job));
  if (running->job.size <= at_once_bytes_max) {
    lock.unlock();
    running->note(call(running->job, 0, running->size));
    if (running->is_over()) return {0, running->moved, running->error};
    lock.lock();
  }
  jobs_.emplace(id, running);
  started_.push_back(running);
  const bool has_to_wake = std::exchange(is_asleep_, false);
  lock.unlock();
  // Whoever is woken wants the lock.
  if (has_to_wake) raise_event(wake_.descriptor);
  return {id, 0, job_done};
}

std::vector<Outcome> Mover::take() {
  const std::lock_guard lock(mutex_);
  is_told_ = false;
  clear_event(done_.descriptor);
  return std::exchange(outcomes_, {});
}

Outcome Mover::stop(std::uint64_t id) {
  std::unique_lock lock(mutex_);
  if (const auto found = jobs_.find(id); found != jobs_.end()) {
    const std::shared_ptr<Running> running = found->second;
    running->is_stopped = true;
    stepped_.wait(lock, [&] { return !running->is_stepping; });
    // The thread may have been faster.
    if (jobs_.contains(id)) {
      leave(*running);
      return {id, running->moved, job_stopped};
    }
  }
  const auto ended = std::ranges::find(outcomes_, id, &Outcome::id);
  if (ended == outcomes_.end()) throw std::invalid_argument("no such job");
  const Outcome outcome = *ended;
  outcomes_.erase(ended);
  return outcome;
}

Progress Mover::progress(std::uint64_t id) {
  std::unique_lock lock(mutex_);
  const auto found = jobs_.find(id);
  if (found == jobs_.end()) {
    const auto ended = std::ranges::find(outcomes_, id, &Outcome::id);
    if (ended == outcomes_.end()) throw std::invalid_argument("no such job");
    return {ended->moved, now_ns()};
  }
  const std::shared_ptr<Running> running = found->second;
  if (running->job.direction == Direction::receive && !running->is_stepping) {
    running->note(call(running->job, running->moved, running->size));
    if (running->is_over()) end(*running);
    else if (running->is_registered) wait_for(*running);
  }
  const Progress progress{running->moved, running->moved_ns};
  tell(lock);
  return progress;
}

bool Mover::shorten(std::uint64_t id, std::size_t size) {
  const std::lock_guard lock(mutex_);
  const auto found = jobs_.find(id);
  if (found == jobs_.end()) {
    const auto ended = std::ranges::find(outcomes_, id, &Outcome::id);
    if (ended == outcomes_.end()) throw std::invalid_argument("no such job");
    return ended->moved <= size;
  }
  Running& running = *found->second;
  if (running.moved >= size) return false;
  running.size = std::min(running.size, size);
  return true;
}

void Mover::run() {
  std::array<epoll_event, events_max> events;
  std::unique_lock lock(mutex_);
  while (!is_closing_) {
    // Those who can go on at once have their next turn after the sockets that have become ready.
    for (auto turns = started_.size(); turns && !started_.empty(); --turns) {
      const auto running = std::move(started_.front());
      started_.pop_front();
      step(running, lock);
    }
    is_asleep_ = started_.empty();
    const int wait_ms = is_asleep_ ? -1 : 0;
    tell(lock);
    const auto count = uninterrupted([&] { return epoll_wait(poll_.descriptor, events.data(), events_max, wait_ms); });
    lock.lock();
    is_asleep_ = false;
    for (const epoll_event& event : std::span(events).first(static_cast<std::size_t>(std::max<ssize_t>(count, 0)))) {
      if (event.data.u64 == wake_id) {
        clear_event(wake_.descriptor);
      } else if (const auto found = jobs_.find(event.data.u64); found != jobs_.end()) {
        const std::shared_ptr<Running> running = found->second;
        step(running, lock);
      }
    }
  }
}

// Called with the lock, which is not held while bytes move.
void Mover::step(const std::shared_ptr<Running>& running, std::unique_lock<std::mutex>& lock) {
  if (running->is_stopped) return;
  running->is_stepping = true;
  const std::size_t start = running->moved, stop = running->size;
  lock.unlock();
  const Call done = call(running->job, start, stop);
  lock.lock();
  running->is_stepping = false;
  running->note(done);
  if (running->is_over()) {
    end(*running);
  } else if (done.is_full && !running->is_registered) {
    started_.push_back(running);
  } else {
    wait_for(*running);
  }
  if (running->is_stopped) stepped_.notify_all();
}

// Lets the lock go; whoever is told wants it.
void Mover::tell(std::unique_lock<std::mutex>& lock) {
  const bool has_to_tell = !outcomes_.empty() && !std::exchange(is_told_, true);
  lock.unlock();
  if (has_to_tell) raise_event(done_.descriptor);
}

void Mover::wait_for(Running& running) {
  running.set_wake_bytes(std::min(running.size - running.moved, running.job.wake_bytes));
  if (running.is_registered) return;
  epoll_event event{.events = running.job.direction == Direction::receive ? EPOLLIN : EPOLLOUT, .data = {.u64 = running.id}};
  running.is_registered = epoll_ctl(poll_.descriptor, EPOLL_CTL_ADD, running.job.socket, &event) == 0;
  if (running.is_registered) return;
  running.error = errno;
  end(running);
}

void Mover::end(Running& running) {
  outcomes_.push_back({running.id, running.moved, running.error});
  leave(running);
}

// Nothing of a job is touched after this.
void Mover::leave(Running& running) {
  if (running.is_registered) epoll_ctl(poll_.descriptor, EPOLL_CTL_DEL, running.job.socket, nullptr);
  running.set_wake_bytes(1);
  std::erase_if(started_, [&](const auto& one) { return one.get() == &running; });
  jobs_.erase(running.id);
}

}  // namespace kvtide
