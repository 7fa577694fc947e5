// Times, medians and the file that results go to, for every benchmark.
#pragma once

#include <chrono>
#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "bench.h"

namespace mlxtape::bench {

using Clock = std::chrono::steady_clock;

double microseconds(Clock::duration d);
double median(std::vector<double> v);
double best(const std::vector<double>& v);

// Appends samples of one call's time until `seconds` are spent, at least three. Short calls are
// timed in groups, so that reading the clock costs nothing.
void sample(const std::function<void()>& call, double seconds, std::vector<double>& samples);

std::string today();

// What every report says of where it comes from, and no rows yet.
nlohmann::json report_of(const Device& device, const BenchConfig& config);
void write_json(const std::string& path, const nlohmann::json& report);  // nowhere if path is empty

}  // namespace mlxtape::bench
