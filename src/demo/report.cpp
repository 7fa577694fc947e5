#include "report.h"

#include <algorithm>

#include "base/human.h"
#include "svg.h"

namespace mlxtape::demo {

namespace {

constexpr int kNeutral = 5;  // the colour of what is no task: --s5

const char* const kStyle = R"(
:root { color-scheme: light dark; --page: #f6f7f9; --card: #ffffff; --text: #1c2330; --soft: #5d6778;
  --rule: #dfe3ea; --s0: #0068b4; --s1: #d55e00; --s2: #00875f; --s3: #b6408f; --s4: #a17900; --s5: #7a8699; }
@media (prefers-color-scheme: dark) {
  :root { --page: #12161d; --card: #1a2029; --text: #e4e8ef; --soft: #9aa5b6; --rule: #303846;
    --s0: #5db4f5; --s1: #f79152; --s2: #3fc79a; --s3: #e48cc6; --s4: #dcb94a; --s5: #8b97aa; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--text); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1040px; margin: 0 auto; padding: 28px 20px 48px; }
h1 { font-size: 26px; margin: 0 0 4px; } h2 { font-size: 16px; margin: 0 0 2px; }
p { margin: 0 0 12px; color: var(--soft); } .lead { font-size: 16px; margin-bottom: 20px; }
.row { display: grid; grid-template-columns: 1fr 1fr; gap: 16px; } .tiles { grid-template-columns: repeat(4, 1fr); }
.card { background: var(--card); border: 1px solid var(--rule); border-radius: 10px; padding: 16px 18px;
  margin-bottom: 16px; min-width: 0; overflow-x: auto; }
.tile b { display: block; font-size: 26px; line-height: 1.2; font-variant-numeric: tabular-nums; } .tile span { color: var(--soft); }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th { text-align: left; font-weight: 600; color: var(--soft); } td, th { padding: 6px 10px 6px 0; border-bottom: 1px solid var(--rule); }
tr:last-child td { border-bottom: 0; } .n { text-align: right; }
code { font: 13px/1.4 ui-monospace, monospace; overflow-wrap: anywhere; } .wrong { color: var(--s1); text-decoration: line-through; }
svg + h2 { margin-top: 18px; } td:first-child { white-space: nowrap; }
svg { display: block; width: 100%; height: auto; font: 12px system-ui, sans-serif; }
.axis { stroke: var(--soft); } .grid { stroke: var(--rule); } .tick { fill: var(--soft); }
.label { fill: var(--text); } .value { fill: var(--text); } .on { fill: var(--card); }
.curve { fill: none; stroke-width: 2; stroke-linejoin: round; }
.s0 { stroke: var(--s0); } .s1 { stroke: var(--s1); } .s2 { stroke: var(--s2); } .s3 { stroke: var(--s3); }
.s4 { stroke: var(--s4); } .s5 { stroke: var(--s5); } .fill { stroke: none; }
.fill.s0 { fill: var(--s0); } .fill.s1 { fill: var(--s1); } .fill.s2 { fill: var(--s2); }
.fill.s3 { fill: var(--s3); } .fill.s4 { fill: var(--s4); } .fill.s5 { fill: var(--s5); }
@media (max-width: 760px) { .row, .tiles { grid-template-columns: 1fr; } }
)";

std::string percent(double share, int digits = 1) { return fixed(100 * share, digits) + " %"; }
std::string bytes_of(std::size_t bytes) { return human_bytes(static_cast<double>(bytes)); }

std::string card(const std::string& title, const std::string& sentence, const std::string& inside) {
  return "<section class=\"card\"><h2>" + escaped(title) + "</h2><p>" + escaped(sentence) +
         "</p>\n" + inside + "</section>\n";
}
std::string row(const std::string& left, const std::string& right) {
  return "<div class=\"row\">\n" + left + right + "</div>\n";
}

// Rows of cells that are HTML; of each column whether its cells are numbers.
std::string table(const std::vector<std::string>& header,
                  const std::vector<std::vector<std::string>>& rows,
                  const std::vector<bool>& numbers) {
  const auto cells = [&](const std::vector<std::string>& texts, const std::string& tag) {
    std::string out = "<tr>";
    for (std::size_t i = 0; i < texts.size(); ++i) {
      const bool is_number = i < numbers.size() && numbers[i];
      out += "<" + tag + (is_number ? " class=\"n\">" : ">") + texts[i] + "</" + tag + ">";
    }
    return out + "</tr>\n";
  };
  std::string out = "<table>\n";
  if (!header.empty()) out += cells(header, "th");
  for (const auto& one : rows) out += cells(one, "td");
  return out + "</table>\n";
}

std::string tile(const std::string& value, const std::string& what) {
  return "<div class=\"card tile\"><b>" + escaped(value) + "</b><span>" + escaped(what) +
         "</span></div>\n";
}

std::string head(const DemoResult& r) {
  const double full = r.models[0].scores.all().share(), four = r.models[1].scores.all().share();
  const std::string lead =
      "A Qwen3-Next with " + human_count(static_cast<double>(r.parameters)) + " parameters (" +
      human_count(static_cast<double>(r.active_parameters)) +
      " active per token: delta nets, gated attention, " + std::to_string(r.experts_per_token) +
      " of " + std::to_string(r.experts) + " experts and a shared one) learned five tasks from " +
      "scratch, was quantised to 4 and 2 bits, and the 2-bit model was distilled. All numbers "
      "are " +
      "from this run.";
  std::string lost = fixed(100 * (full - four), 1);
  if (lost == "-0.0") lost = "0.0";
  return "<h1>mlxtape demo</h1>\n<p class=\"lead\">" + escaped(lead) +
         "</p>\n<div class=\"row tiles\">\n" +
         tile(percent(full), "accuracy on " + std::to_string(r.cases) + " held-out questions") +
         tile(lost + " points", "of accuracy lost in 4 bits") +
         tile(percent(r.removed()), "of the 2-bit model's KL removed by DWQ") +
         tile(human_time(r.seconds), "in all, from scratch to this page") + "</div>\n";
}

std::string models_card(const DemoResult& r) {
  std::vector<std::vector<std::string>> rows;
  for (const DemoModel& m : r.models) {
    const jobs::Evaluation& e = m.evaluation;
    rows.push_back({escaped(m.name), bytes_of(m.bytes), fixed(m.bits_per_weight, 2),
                    percent(m.scores.all().share())});
    for (const TaskScore& task : m.scores.of) rows.back().push_back(percent(task.share(), 0));
    rows.back().push_back(fixed(e.perplexity.value, 4));
    rows.back().push_back(fixed(e.kl.value, 4) + " ± " + fixed(e.kl.error, 4));
  }
  std::vector<std::string> header{"model", "size", "bits/weight", "accuracy"};
  for (std::size_t t = 0; t < kTasks; ++t) {
    header.emplace_back(name_of(static_cast<Task>(t)));
  }
  header.insert(header.end(), {"perplexity", "KL to full, nats"});
  std::vector<bool> numbers(header.size(), true);
  numbers[0] = false;
  return card(
      "The models",
      "An answer is right if all of it is, with greedy decoding. Perplexity and KL divergence "
      "are over the bytes of the answers. Sizes are those of the tensors in the files.",
      table(header, rows, numbers));
}

std::string training_cards(const DemoResult& r) {
  Series loss;
  for (const jobs::FitPoint& point : r.training.reports) {
    loss.points.emplace_back(static_cast<double>(point.step), point.loss);
  }
  ChartOptions o;
  o.title = "loss by training step";
  o.x_label = "training step";
  o.y_label = "loss, nats per byte of the answer";
  o.log_y = true;
  const std::string left =
      card("Loss",
           "Mean cross-entropy of the answers, in batches of " + std::to_string(r.batch_size) +
               " new lines; AdamW, warm-up, cosine.",
           line_chart({loss}, o));

  std::vector<Series> tasks;
  for (std::size_t t = 0; t < kTasks; ++t) {
    Series one{name_of(static_cast<Task>(t)), {}, static_cast<int>(t)};
    for (const DemoPoint& point : r.points) {
      one.points.emplace_back(static_cast<double>(point.step), 100 * point.scores.of[t].share());
    }
    tasks.push_back(std::move(one));
  }
  o = {};
  o.title = "accuracy by training step";
  o.x_label = "training step";
  o.y_label = "accuracy on held-out questions, %";
  o.y_high = 100;
  return row(left, card("Accuracy by task",
                        "Held-out questions never occur in training: a hash of the question "
                        "decides which set it is in.",
                        line_chart(tasks, o)));
}

std::string distilled_cards(const DemoResult& r) {
  std::vector<Bar> kl, sizes;
  for (const DemoModel& m : r.models) {
    sizes.push_back({m.name, bytes_of(m.bytes), static_cast<double>(m.bytes), 0});
    if (&m == &r.models[0]) continue;  // its own
    const double value = m.evaluation.kl.value;
    kl.push_back({m.name, fixed(value, 4) + " nats", value, &m == &r.models[3] ? 2 : 1});
  }
  Series loss{{}, {}, 2};
  for (const jobs::FitPoint& point : r.dwq.fit.reports) {
    loss.points.emplace_back(static_cast<double>(point.step), point.loss);
  }
  ChartOptions o;
  o.title = "KL divergence by DWQ step";
  o.x_label = "DWQ step";
  o.y_label = "KL divergence at temperature 2, nats";
  o.height = 230;
  return row(card("KL divergence from the full model",
                  "Over the bytes of held-out answers; 0: identical predictions.",
                  bar_chart(kl, "KL divergence before and after DWQ") + "<h2>Size</h2>\n" +
                      bar_chart(sizes, "size of the weights")),
             card("Distilling the 2-bit model",
                  human_count(static_cast<double>(r.dwq.trained)) +
                      " scales, biases and norms are trained to match the full model; the codes do "
                      "not change.",
                  line_chart({loss}, o)));
}

std::string answers_card(const DemoResult& r) {
  std::vector<std::string> header{"prompt", "answer"};
  for (const DemoModel& m : r.models) header.push_back(escaped(m.name));
  std::vector<std::vector<std::string>> rows;
  for (std::size_t q = 0; q < r.questions.size(); ++q) {
    const std::string right = r.questions[q].answer.substr(0, r.questions[q].answer.size() - 1);
    rows.push_back({"<code>" + escaped(r.questions[q].prompt) + "</code>",
                    "<code>" + escaped(right) + "</code>"});
    for (const DemoModel& m : r.models) {
      const std::string& said = m.answers[q];
      rows.back().push_back(std::string("<code") + (said == right ? ">" : " class=\"wrong\">") +
                            (said.empty() ? "(nothing)" : escaped(printable(said))) + "</code>");
    }
  }
  return card("Answers",
              "The first held-out questions of each task and every model's answers; wrong ones are "
              "struck out.",
              table(header, rows, {}));
}

std::string time_cards(const DemoResult& r) {
  constexpr std::size_t kShown = 14;
  const double steps = std::max<double>(1, static_cast<double>(r.traced_steps));
  std::vector<Bar> bars;
  double all = 0, others = 0;
  for (const KernelTime& kernel : r.kernels) all += kernel.seconds;
  const auto written = [&](double seconds) {
    return fixed(1e3 * seconds / steps, 2) + " ms, " + percent(all > 0 ? seconds / all : 0, 0);
  };
  for (std::size_t k = 0; k < r.kernels.size(); ++k) {
    const KernelTime& kernel = r.kernels[k];
    if (k < kShown) {
      bars.push_back({kernel.name, written(kernel.seconds), kernel.seconds, 0});
    } else {
      others += kernel.seconds;
    }
  }
  if (others > 0) {
    bars.push_back(
        {std::to_string(r.kernels.size() - kShown) + " others", written(others), others, kNeutral});
  }
  std::vector<Bar> stages;
  for (const auto& [name, seconds] : r.stages) {
    stages.push_back({name, human_time(seconds), seconds, kNeutral});
  }
  const std::string tokens =
      fixed(static_cast<double>(r.tokens) / std::max(1e-9, r.training.seconds), 0);
  std::vector<std::vector<std::string>> facts{
      {"training",
       escaped(human_count(static_cast<double>(r.tokens)) + " tokens, " + tokens + " tokens/s")},
      {"peak memory, training", bytes_of(r.training.peak_bytes)},
      {"peak memory, whole process", bytes_of(r.peak_bytes)},
      {"seed", std::to_string(r.seed)}};
  for (const auto& [name, value] : r.machine) {
    facts.push_back({escaped(name),
                     name == "command" ? "<code>" + escaped(value) + "</code>" : escaped(value)});
  }
  return row(card("Time by kernel",
                  fixed(1e3 * r.traced_seconds / steps, 1) + " ms per training step, of which " +
                      fixed(1e3 * all / steps, 1) + " ms in kernels; mean of " +
                      std::to_string(r.traced_steps) + " steps.",
                  bar_chart(bars, "time by kernel", 460, 240)),
             card("Time, memory, machine", "Memory is the peak in use.",
                  bar_chart(stages, "time by stage", 460, 150) + table({}, facts, {})));
}

}  // namespace

std::string report_page(const DemoResult& r) {
  return "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\n"
         "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n"
         "<title>mlxtape demo</title>\n<style>" +
         std::string(kStyle) + "</style></head>\n<body><main>\n" + head(r) + models_card(r) +
         training_cards(r) + distilled_cards(r) + answers_card(r) +
         card("Experts",
              "How often each expert was chosen, in % of all choices on held-out questions.",
              heat_map(r.routes, "layer", "expert")) +
         time_cards(r) + "</main></body></html>\n";
}

}  // namespace mlxtape::demo
