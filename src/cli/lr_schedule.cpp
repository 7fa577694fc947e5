#include "lr_schedule.h"

#include "mlxtape/base/quote.h"

namespace mlxtape::cli {

jobs::Schedule schedule_of(const formats::Json& value, const std::string& file) {
  const auto expect = [&](bool is, const std::string& what, const formats::Json& got) {
    if (is) return;
    throw Error(Errc::kIo, file + ": lr_schedule: " + what + ", got " + shown(got.dump()));
  };
  jobs::Schedule schedule;
  if (value.is_null()) return schedule;
  expect(value.is_object(), "must be an object", value);
  for (const auto& [key, what] : value.object()) {
    if (key == "name") {
      expect(what.is_string(), "name must be a text", what);
      schedule.name = what.string();
    } else if (key == "arguments") {
      expect(what.is_array(), "arguments must be a list of numbers", what);
      for (const formats::Json& each : what.array()) {
        expect(each.is_number(), "arguments must be a list of numbers", each);
        schedule.arguments.push_back(each.number());
      }
    } else if (key == "warmup") {
      expect(what.is_integer(), "warmup must be a whole number", what);
      schedule.warmup = what.integer();
    } else if (key == "warmup_init") {
      expect(what.is_number(), "warmup_init must be a number", what);
      schedule.warmup_init = what.number();
    } else {
      throw Error(Errc::kIo, file +
                                 ": lr_schedule: must have name, arguments, warmup and "
                                 "warmup_init alone, got '" +
                                 shown(key) + "'");
    }
  }
  if (const Check check = jobs::schedule_check(schedule)) {
    throw Error(Errc::kIo, file + ": lr_" + check->what());
  }
  return schedule;
}

}  // namespace mlxtape::cli
