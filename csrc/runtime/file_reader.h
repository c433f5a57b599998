// Reads a range of a file by several threads at a time.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

namespace pyllm::runtime {

// The threads live as long as the reader: a tensor of 32 MiB is read in less than a millisecond, of which starting them would take a tenth.
class FileReader {
 public:
  explicit FileReader(int64_t threads);  // the caller's included
  ~FileReader();
  FileReader(const FileReader&) = delete;
  FileReader& operator=(const FileReader&) = delete;

  // Fills `out` with the bytes from `begin` on. Returns how many of them there are: fewer, and some of them unread, where the file ends
  // before. Throws std::system_error where the system refuses. One caller at a time; others wait.
  int64_t read(int descriptor, int64_t begin, std::span<char> out);

 private:
  struct Job {
    int descriptor;
    int64_t begin;
    std::span<char> out;
    int64_t piece;
  };

  void serve();
  void work(const Job& job);

  std::mutex one_caller_, mutex_;
  std::condition_variable wake_, done_;
  std::vector<std::thread> threads_;
  Job job_{};
  int64_t turn_ = 0;  // of the job that the threads were last told of
  size_t busy_ = 0;   // threads that have not finished it
  bool stopped_ = false;
  std::atomic<int64_t> next_{0}, end_{0};  // the next byte that nobody reads yet; where the file was found to end
  std::atomic<int> error_{0};
};

}  // namespace pyllm::runtime
