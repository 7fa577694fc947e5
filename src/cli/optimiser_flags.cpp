#include "optimiser_flags.h"

#include <CLI/CLI.hpp>

#include <algorithm>
#include <array>
#include <limits>
#include <utility>

namespace mlxtape::cli {

namespace {

struct What {
  const char *setting, *says;
};
constexpr std::array<What, 10> kSettings = {
    {{"weight_decay", "weight decay"},
     {"beta1", "decay rate of the first moment"},
     {"beta2", "decay rate of the second moment; lion: of its only moment"},
     {"eps", "added to the denominator of the update"},
     {"bias_correction", "correct the moments for starting at zero"},
     {"momentum", "momentum"},
     {"dampening", "dampening of the momentum"},
     {"nesterov", "Nesterov momentum"},
     {"ns_steps", "Newton-Schulz steps"},
     {"adamw_share",
      "learning rate of the weights that muon leaves to AdamW (embeddings, head, norms), as a "
      "share "
      "of --learning-rate"}}};

std::string flag_of(std::string setting) {
  std::replace(setting.begin(), setting.end(), '_', '-');
  return "--" + setting;
}

std::string text_of(const jobs::OptimiserSetting& setting) {
  if (setting.is_switch) return setting.value != 0 ? "true" : "false";
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%g", setting.value);
  return text.data();
}

// "0.999 (adamw, adam), 0.99 (lion)"
std::string defaults_of(const std::string& setting, const jobs::OptimiserNumbers& usual,
                        bool& is_switch) {
  std::vector<std::pair<std::string, std::string>> values;  // and whose they are
  for (const std::string& name : jobs::optimiser_names()) {
    for (const jobs::OptimiserSetting& s : jobs::optimiser_settings(name, usual)) {
      if (s.name != setting) continue;
      is_switch = s.is_switch;
      const std::string value = text_of(s);
      const auto found = std::find_if(values.begin(), values.end(),
                                      [&](const auto& each) { return each.first == value; });
      if (found == values.end()) {
        values.emplace_back(value, name);
      } else {
        found->second += ", " + name;
      }
    }
  }
  std::string all;
  for (const auto& [value, names] : values) {
    all += (all.empty() ? "" : ", ") + value + " (" + names + ")";
  }
  return all;
}

CLI::Validator known_optimiser() {
  return {[](std::string& name) -> std::string {
            const auto names = jobs::optimiser_names();
            if (std::find(names.begin(), names.end(), name) != names.end()) return "";
            std::string all;
            for (const std::string& each : names) all += (all.empty() ? "" : ", ") + each;
            return (name == "adafactor" ? "adafactor is not supported; " : "") +
                   ("must be one of " + all) + ", got '" + name + "'";
          },
          ""};
}

}  // namespace

void OptimiserFlags::add_to(CLI::App& command, const char* group) {
  command
      .add_option("--optimizer", name_,
                  "adamw, adam (without weight decay), sgd, muon (matrices; the rest by AdamW) or "
                  "lion")
      ->check(known_optimiser())
      ->type_name("NAME")
      ->group(group);
  add_hidden_names(command, "--optimizer", "--optimiser");
  for (const What& each : kSettings) {
    bool is_switch = false;
    const std::string defaults = defaults_of(each.setting, usual_, is_switch);
    CLI::Option* const option =
        is_switch ? command.add_option(flag_of(each.setting), switches_[each.setting], each.says)
                        ->type_name("BOOL")
                  : command.add_option(flag_of(each.setting), numbers_[each.setting], each.says)
                        ->check(number(0, std::numeric_limits<float>::max()))
                        ->type_name("X");
    option->default_str(defaults)->group(group);
  }
}

jobs::OptimiserPtr OptimiserFlags::made() const {
  jobs::OptimiserNumbers given;
  for (const auto& [setting, value] : numbers_) {
    if (value) given[setting] = *value;
  }
  for (const auto& [setting, value] : switches_) {
    if (value) given[setting] = *value ? 1 : 0;
  }
  std::string takes;
  jobs::OptimiserNumbers unknown = given;
  for (const jobs::OptimiserSetting& s : jobs::optimiser_settings(name_)) {
    takes += (takes.empty() ? "" : ", ") + flag_of(s.name);
    unknown.erase(s.name);
  }
  if (!unknown.empty()) {
    called_wrongly(flag_of(unknown.begin()->first) + " does not apply to --optimizer " + name_ +
                   ", which takes " + takes);
  }
  return jobs::make_optimiser(name_, given, usual_);
}

}  // namespace mlxtape::cli
