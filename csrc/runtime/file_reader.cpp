#include "file_reader.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <stdexcept>
#include <string>
#include <system_error>

namespace pyllm::runtime {
namespace {

constexpr int64_t kSmall = 256 << 10;  // read by the caller alone: waking a thread takes as long
constexpr int64_t kMost = 2 << 20;     // of a piece: small enough that all threads end together
constexpr int64_t kMostThreads = 256;

}  // namespace

FileReader::FileReader(int64_t threads) {
  if (threads < 1 || threads > kMostThreads) {
    throw std::invalid_argument("FileReader: threads is " + std::to_string(threads) + ", expected 1 to " + std::to_string(kMostThreads));
  }
  for (int64_t i = 1; i < threads; ++i) threads_.emplace_back([this] { serve(); });
}

FileReader::~FileReader() {
  {
    const std::scoped_lock lock(mutex_);
    stopped_ = true;
  }
  wake_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

int64_t FileReader::read(int descriptor, int64_t begin, std::span<char> out) {
  const std::scoped_lock one(one_caller_);
  const auto size = static_cast<int64_t>(out.size()), readers = static_cast<int64_t>(threads_.size()) + 1;
  const Job job{descriptor, begin, out, std::clamp((size + readers - 1) / readers, kSmall, kMost)};
  next_ = 0, end_ = size, error_ = 0;
  const bool alone = size <= kSmall || threads_.empty();
  if (!alone) {
    const std::scoped_lock lock(mutex_);
    job_ = job, ++turn_, busy_ = threads_.size();
  }
  if (!alone) wake_.notify_all();
  work(job);
  if (!alone) {
    std::unique_lock lock(mutex_);
    done_.wait(lock, [this] { return busy_ == 0; });
  }
  if (const int error = error_) throw std::system_error(error, std::generic_category(), "read");
  return end_;
}

void FileReader::serve() {
  int64_t seen = 0;
  std::unique_lock lock(mutex_);
  for (;;) {
    wake_.wait(lock, [&] { return stopped_ || turn_ != seen; });
    if (stopped_) return;
    seen = turn_;
    const Job job = job_;
    lock.unlock();
    work(job);
    lock.lock();
    if (--busy_ == 0) done_.notify_one();
  }
}

void FileReader::work(const Job& job) {
  const auto size = static_cast<int64_t>(job.out.size());
  for (int64_t at; (at = next_.fetch_add(job.piece)) < size;) {
    for (const int64_t last = std::min(at + job.piece, size); at < last;) {
      const ssize_t got = pread(job.descriptor, job.out.data() + at, last - at, job.begin + at);
      if (got > 0) {
        at += got;
      } else if (got == 0) {
        for (int64_t end = end_; at < end && !end_.compare_exchange_weak(end, at);) {
        }
        return;
      } else if (errno != EINTR) {
        error_ = errno;
        return;
      }
    }
  }
}

}  // namespace pyllm::runtime
