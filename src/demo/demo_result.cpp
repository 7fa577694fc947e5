#include "demo_result.h"

#include <array>
#include <cstdio>

#include "mlxtape/base/checksum.h"

namespace mlxtape::demo {

namespace {

using formats::Json;

Json of_scores(const TaskScores& scores) {
  Json result = Json::Object{{"all", scores.all().share()}};
  for (std::size_t t = 0; t < kTasks; ++t) {
    result.set(name_of(static_cast<Task>(t)), scores.of[t].share());
  }
  return result;
}

Json of_points(const std::vector<jobs::FitPoint>& points) {
  Json::Array rows;
  for (const jobs::FitPoint& point : points) {
    rows.emplace_back(Json::Object{{"step", point.step}, {"loss", point.loss}});
  }
  return rows;
}

Json of_kernels(const std::vector<KernelTime>& kernels) {
  Json::Array rows;
  for (const KernelTime& kernel : kernels) {
    rows.emplace_back(
        Json::Object{{"name", kernel.name}, {"calls", kernel.calls}, {"seconds", kernel.seconds}});
  }
  return rows;
}

Json of_stages(const std::vector<std::pair<std::string, double>>& stages) {
  Json result = Json::Object{};
  for (const auto& [name, seconds] : stages) result.set(name, seconds);
  return result;
}

const Json& at(const Json& json, const char* key) {
  if (const Json* found = json.find(key)) return *found;
  throw Error(Errc::kIo, "a demo's progress.json must have \"" + std::string(key) + "\"");
}

constexpr const char* kChecksum = "checksum";

std::string checksum_of(const Json& json) {
  const std::string text = json.dump();
  Checksum sum;
  sum.add(std::as_bytes(std::span(text.data(), text.size())));
  std::array<char, 17> digits{};
  std::snprintf(digits.data(), digits.size(), "%016llx",
                static_cast<unsigned long long>(sum.value()));
  return digits.data();
}

Json of_model(const DemoModel& model) {
  Json::Array answers;
  for (const std::string& answer : model.answers) answers.emplace_back(printable(answer));
  const jobs::Evaluation& e = model.evaluation;
  return Json::Object{{"name", model.name},
                      {"folder", model.folder},
                      {"bytes", static_cast<std::int64_t>(model.bytes)},
                      {"bits_per_weight", model.bits_per_weight},
                      {"right", of_scores(model.scores)},
                      {"perplexity", e.perplexity.value},
                      {"perplexity_error", e.perplexity.error},
                      {"kl", e.kl.value},
                      {"kl_error", e.kl.error},
                      {"agreement", e.agreement.value},
                      {"answers", std::move(answers)}};
}

Json of_run(const DemoResult& result) {
  Json::Array points, routes;
  for (const DemoPoint& point : result.points) {
    points.emplace_back(Json::Object{{"step", point.step}, {"right", of_scores(point.scores)}});
  }
  for (const std::vector<double>& layer : result.routes) {
    Json::Array shares;
    for (const double share : layer) shares.emplace_back(share);
    routes.emplace_back(std::move(shares));
  }
  return Json::Object{{"iterations", result.iterations},
                      {"batch_size", result.batch_size},
                      {"tokens", result.tokens},
                      {"seconds", result.training.seconds},
                      {"peak_bytes", static_cast<std::int64_t>(result.training.peak_bytes)},
                      {"loss", of_points(result.training.reports)},
                      {"held_out", std::move(points)},
                      {"expert_shares", std::move(routes)}};
}

}  // namespace

std::string printable(const std::string& bytes) {
  std::string text;
  for (const char c : bytes) text += c > 31 && c < 127 ? c : '?';
  return text;
}

double DemoResult::removed() const {
  const double before = models.at(2).evaluation.kl.value, after = models.at(3).evaluation.kl.value;
  return before > 0 ? 1 - after / before : 0;
}

Json to_json(const DemoResult& result) {
  Json machine = Json::Object{};
  for (const auto& [name, value] : result.machine) machine.set(name, value);
  Json::Array models, questions;
  for (const DemoModel& model : result.models) models.push_back(of_model(model));
  for (const TaskCase& one : result.questions) {
    questions.emplace_back(Json::Object{{"prompt", one.prompt}, {"answer", one.answer}});
  }
  return Json::Object{{"machine", std::move(machine)},
                      {"seed", static_cast<std::int64_t>(result.seed)},
                      {"parameters", result.parameters},
                      {"active_parameters", result.active_parameters},
                      {"held_out_cases", result.cases},
                      {"training", of_run(result)},
                      {"dwq", Json::Object{{"steps", result.dwq.fit.steps},
                                           {"trained", result.dwq.trained},
                                           {"loss", of_points(result.dwq.fit.reports)},
                                           {"kl_removed", result.removed()}}},
                      {"models", std::move(models)},
                      {"questions", std::move(questions)},
                      {"traced_steps", result.traced_steps},
                      {"traced_seconds", result.traced_seconds},
                      {"kernels", of_kernels(result.kernels)},
                      {"stages", of_stages(result.stages)},
                      {"peak_bytes", static_cast<std::int64_t>(result.peak_bytes)},
                      {"seconds", result.seconds}};
}

Json demo_progress(const DemoResult& result) {
  Json::Array points;
  for (const DemoPoint& point : result.points) {
    Json::Array right, cases;
    for (const TaskScore& score : point.scores.of) {
      right.emplace_back(score.right);
      cases.emplace_back(score.cases);
    }
    points.emplace_back(Json::Object{
        {"step", point.step}, {"right", std::move(right)}, {"cases", std::move(cases)}});
  }
  Json progress =
      Json::Object{{"iterations", result.iterations},
                   {"held_out", std::move(points)},
                   {"traced_steps", result.traced_steps},
                   {"traced_seconds", result.traced_seconds},
                   {"kernels", of_kernels(result.kernels)},
                   {"stages", of_stages(result.stages)},
                   {"training_peak_bytes", static_cast<std::int64_t>(result.training.peak_bytes)},
                   {"peak_bytes", static_cast<std::int64_t>(result.peak_bytes)}};
  progress.set(kChecksum, checksum_of(progress));
  return progress;
}

void read_demo_progress(const Json& progress, DemoResult& result) {
  Json rest = progress;
  rest.erase(kChecksum);
  if (at(progress, kChecksum).string() != checksum_of(rest)) {
    throw Error(Errc::kIo, "its content does not match its checksum");
  }
  result.iterations = at(progress, "iterations").integer();
  for (const Json& row : at(progress, "held_out").array()) {
    DemoPoint point{at(row, "step").integer(), {}};
    const Json::Array &right = at(row, "right").array(), &cases = at(row, "cases").array();
    if (right.size() != kTasks || cases.size() != kTasks) {
      throw Error(Errc::kIo, "a demo's progress.json must have a score for each of " +
                                 std::to_string(kTasks) + " tasks");
    }
    for (std::size_t t = 0; t < kTasks; ++t) {
      point.scores.of[t] = {right[t].integer(), cases[t].integer()};
    }
    result.points.push_back(point);
  }
  result.traced_steps = at(progress, "traced_steps").integer();
  result.traced_seconds = at(progress, "traced_seconds").number();
  for (const Json& row : at(progress, "kernels").array()) {
    result.kernels.push_back(
        {at(row, "name").string(), at(row, "calls").integer(), at(row, "seconds").number()});
  }
  for (const auto& [name, seconds] : at(progress, "stages").object()) {
    result.stages.emplace_back(name, seconds.number());
  }
  result.training.peak_bytes =
      static_cast<std::size_t>(at(progress, "training_peak_bytes").integer());
  result.peak_bytes = static_cast<std::size_t>(at(progress, "peak_bytes").integer());
}

}  // namespace mlxtape::demo
