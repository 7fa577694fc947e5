// Times, medians and the file that results go to, for every benchmark.
#pragma once

#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "bench.h"
#include "mlxtape/formats/json.h"

namespace mlxtape::bench {

using Clock = std::chrono::steady_clock;

double microseconds(Clock::duration d);
double median(std::vector<double> v);
double best(const std::vector<double>& v);

// Appends samples of one call's time until `seconds` are spent, at least three. Short calls are
// timed in groups, so that reading the clock costs nothing.
void sample(const std::function<void()>& call, double seconds, std::vector<double>& samples);

std::string today();

using formats::Json;

// Bytes and other counts, as JSON has them.
inline Json count(std::size_t n) { return static_cast<std::int64_t>(n); }

// What config.json_path gets, where it names a file: where the results come from, and the rows so far.
class Report {
 public:
  Report(const Device& device, const BenchConfig& config);

  void set(std::string_view key, Json value) { head_.set(key, std::move(value)); }
  void add(Json row);  // and writes
  void replace(std::size_t row, Json with);
  const Json& row(std::size_t i) const { return rows_[i]; }
  void write() const;

 private:
  std::string path_;
  Json head_ = Json::Object{};
  Json::Array rows_;
};

}  // namespace mlxtape::bench
