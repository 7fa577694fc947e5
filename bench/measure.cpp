#include "measure.h"

#include <algorithm>
#include <ctime>
#include <filesystem>

#include "mlxtape/base/error.h"
#include "mlxtape/base/files.h"
#include "mlxtape/core/threads.h"

namespace mlxtape::bench {

double microseconds(Clock::duration d) {
  return std::chrono::duration<double, std::micro>(d).count();
}

double median(std::vector<double> v) {
  std::sort(v.begin(), v.end());
  return v.empty() ? 0 : (v[(v.size() - 1) / 2] + v[v.size() / 2]) / 2;
}

double best(const std::vector<double>& v) { return *std::min_element(v.begin(), v.end()); }

void sample(const std::function<void()>& call, double seconds, std::vector<double>& samples) {
  const auto start = Clock::now();
  call();
  const double once = std::max(0.01, microseconds(Clock::now() - start));
  const int group = std::clamp(static_cast<int>(50 / once), 1, 10000);
  const auto end = start + std::chrono::duration<double>(seconds);
  for (int taken = 0; taken < 3 || Clock::now() < end; ++taken) {
    const auto from = Clock::now();
    for (int i = 0; i < group; ++i) call();
    samples.push_back(microseconds(Clock::now() - from) / group);
  }
}

std::string today() {
  const std::time_t now = std::time(nullptr);
  char text[16];
  std::strftime(text, sizeof text, "%Y-%m-%d", std::gmtime(&now));
  return text;
}

void expect_report_or_none(const std::string& path) {
  std::error_code none;
  if (path.empty() || !std::filesystem::is_regular_file(path, none)) return;  // a pipe may be one
  bool is_report = std::filesystem::file_size(path, none) == 0;
  try {
    const Json json = is_report ? Json() : Json::read_file(path, "bench");
    const Json* rows = json.is_object() ? json.find("rows") : nullptr;
    is_report = is_report || (rows != nullptr && rows->is_array());
  } catch (const Error&) {  // something else
  }
  if (is_report) return;
  throw Error(Errc::kIo, "bench: " + path +
                             ": already exists and holds no results of a benchmark, so it is not "
                             "overwritten; use another place, or move it away");
}

Report::Report(const Device& device, const BenchConfig& config) : path_(config.json_path) {
  expect_report_or_none(path_);
  write();  // an hour later would be late to find out
  head_ = Json::Object{{"schema", 1},
                       {"machine", device.name()},
                       {"commit", config.commit},
                       {"command", config.command},
                       {"date", today()},
                       {"threads", threads()}};
}

void Report::add(Json row) {
  rows_.push_back(std::move(row));
  write();
}

void Report::replace(std::size_t row, Json with) {
  rows_[row] = std::move(with);
  write();
}

void Report::write() const {
  if (path_.empty()) return;
  Json all = head_;
  all.set("rows", rows_);
  write_whole(path_, all.dump(1, true) + "\n", "bench");
}

}  // namespace mlxtape::bench
