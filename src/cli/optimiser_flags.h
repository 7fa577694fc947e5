// --optimizer, and a flag for each setting of any of them.
#pragma once

#include <map>
#include <optional>
#include <string>

#include "command.h"
#include "mlxtape/jobs/optimiser.h"

namespace mlxtape::cli {

class OptimiserFlags {
 public:
  // The job's own: which it takes where none is named, and what is usual there (jobs::make_optimiser).
  OptimiserFlags(std::string name, jobs::OptimiserNumbers usual)
      : name_(std::move(name)), usual_(std::move(usual)) {}

  // Only while this stays where it is.
  void add_to(CLI::App& command, const char* group);
  const std::string& name() const { return name_; }
  // Throws kArgument for a setting that the chosen one does not have.
  jobs::OptimiserPtr made() const;

 private:
  std::string name_;
  jobs::OptimiserNumbers usual_;
  std::map<std::string, std::optional<double>> numbers_;
  std::map<std::string, std::optional<bool>> switches_;
};

}  // namespace mlxtape::cli
