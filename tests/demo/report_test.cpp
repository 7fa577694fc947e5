#include "demo/report.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "demo/demo_model.h"
#include "demo/svg.h"
#include "formats/support.h"
#include "mlxtape/models/size.h"

namespace mlxtape::test {
namespace {

using demo::DemoResult;
using formats::TempFolder;

TEST(CliSvg, Ticks) {
  using List = std::vector<double>;
  EXPECT_EQ(demo::ticks(0, 100, 5), (List{0, 20, 40, 60, 80, 100}));
  EXPECT_EQ(demo::ticks(0, 1800, 6), (List{0, 500, 1000, 1500}));
  EXPECT_EQ(demo::ticks(-3, 3, 3), (List{-2, 0, 2}));
  EXPECT_EQ(demo::ticks(7, 7, 5), List{7});
  EXPECT_EQ(demo::short_number(0.05), "0.05");
  EXPECT_EQ(demo::short_number(1500), "1500");
  EXPECT_EQ(demo::short_number(-0.0), "0");
  EXPECT_EQ(demo::short_number(0.00001), "0.000010");
  EXPECT_EQ(demo::short_number(123456), "123456");
}

TEST(CliSvg, TextIsEscaped) {
  EXPECT_EQ(demo::escaped("<a href=\"x\">&"), "&lt;a href=&quot;x&quot;&gt;&amp;");
}

std::vector<std::string> all_between(const std::string& text, const std::string& before,
                                     const std::string& after) {
  std::vector<std::string> found;
  for (std::size_t at = 0; (at = text.find(before, at)) != std::string::npos;) {
    at += before.size();
    found.push_back(text.substr(at, text.find(after, at) - at));
  }
  return found;
}

// Of a chart of 460 × 300 the plot is from 62 to 446 and, without a legend, from 254 up to 12.
TEST(CliSvg, LinesStandWhereTheirValuesAre) {
  const std::string linear = demo::line_chart({{"", {{0, 0}, {5, 50}, {10, 100}}, 0}}, {});
  EXPECT_EQ(all_between(linear, "<path d=\"", "\""),
            std::vector<std::string>{"M62 254L254 133L446 12"});
  demo::ChartOptions log;
  log.log_y = true;
  const std::string powers =
      demo::line_chart({{"", {{0, 0.01}, {5, 0.1}, {10, 0}, {10, 1}}, 0}}, log);
  EXPECT_EQ(all_between(powers, "<path d=\"", "\""),
            std::vector<std::string>{"M62 254L254 133L446 12"});
  for (const std::vector<demo::Series>& none :
       {std::vector<demo::Series>{{"", {}, 0}}, {{"", {{3, 7}}, 0}}, {{"", {{0, 0}, {1, 0}}, 0}}}) {
    for (const bool log_y : {false, true}) {
      log.log_y = log_y;
      const std::string chart = demo::line_chart(none, log);
      EXPECT_EQ(chart.find("nan"), std::string::npos) << chart;
      EXPECT_EQ(chart.find("inf"), std::string::npos) << chart;
    }
  }
}

TEST(CliSvg, BarsAreAsLongAsTheirValues) {
  const std::string chart =
      demo::bar_chart({{"a", "4", 4, 0}, {"b", "1", 1, 1}, {"c", "0", 0, 1}}, "bars", 442, 130);
  EXPECT_EQ(all_between(chart, "width=\"", "\""), (std::vector<std::string>{"200", "50", "1"}));
  const std::string map = demo::heat_map({{0.5, 0.25}, {0, 1}}, "layer", "expert");
  EXPECT_EQ(all_between(map, "fill-opacity=\"", "\""),
            (std::vector<std::string>{"0.47", "0.26", "0.04", "0.90"}));
}

DemoResult some_result() {
  DemoResult r;
  r.machine = {{"device", "cpu: <some> & other"}, {"command", "mlxtape demo --out \"x\""}};
  r.iterations = 100;
  r.routes = {{0.25, 0.75}, {0.5, 0.5}};
  r.points = {{0, {}}, {100, {}}};
  r.training.reports = {{10, 2.5}, {100, 0.01}};
  r.dwq.fit.reports = {{1, 0.1}, {2, 0.05}};
  r.kernels = {{"matmul_fwd_f32", 3, 0.5}};
  r.stages = {{"training", 12}};
  r.traced_steps = 1;
  r.questions = {{demo::Task::kCopy, "copy abc>", "abc\n"}};
  for (const double kl : {0.0, 0.01, 0.4, 0.1}) {
    demo::DemoModel model;
    model.name = "kl <" + std::to_string(kl);
    model.evaluation.kl.value = kl;
    model.answers = {kl > 0.2 ? "<b>\xff" : "abc"};
    r.models.push_back(model);
  }
  return r;
}

// Every tag that is opened is closed, in its order.
void expect_balanced(const std::string& page) {
  const std::vector<std::string> alone = {"!doctype", "meta", "line", "rect", "path"};
  std::vector<std::string> open;
  for (const std::string& tag : all_between(page, "<", ">")) {
    const std::string name = tag.substr(0, tag.find_first_of(" /\n", 1));
    if (std::find(alone.begin(), alone.end(), name) != alone.end()) continue;
    if (tag[0] != '/') {
      open.push_back(name);
      continue;
    }
    ASSERT_FALSE(open.empty()) << tag;
    EXPECT_EQ(tag.substr(1), open.back());
    open.pop_back();
  }
  EXPECT_TRUE(open.empty());
}

TEST(CliReport, IsOnePageThatNeedsNothingElse) {
  const std::string page = demo::report_page(some_result());
  expect_balanced(page);
  for (const char* no : {"<script", "http:", "https:", "src=", "@import", "url(", "nan", "inf\""}) {
    EXPECT_EQ(page.find(no), std::string::npos) << no;
  }
  for (const char* yes : {"prefers-color-scheme: dark", "cpu: &lt;some&gt; &amp; other", "75.0 %",
                          "matmul_fwd_f32", "class=\"wrong\">&lt;b&gt;?<",
                          "accuracy on held-out questions, %", "layer 1", "0.4000 ± "}) {
    EXPECT_NE(page.find(yes), std::string::npos) << yes;
  }
}

TEST(CliReport, ResultAsJson) {
  const formats::Json json = demo::to_json(some_result());
  EXPECT_NEAR(json.find("dwq")->find("kl_removed")->number(), 0.75, 1e-12);
  EXPECT_EQ(json.find("models")->array().size(), 4U);
  EXPECT_EQ(json.find("models")->array()[2].find("answers")->array()[0].string(), "<b>?");
  EXPECT_EQ(formats::Json::parse(json.dump(2), "test"), json);
}

TEST(CliDemo, ModelAndTokenizer) {
  const models::Config config = demo::demo_config();
  EXPECT_NEAR(static_cast<double>(models::parameter_count(config)), 2e6, 1e5);
  EXPECT_EQ(config.plan.layer(0).attention(), nullptr);
  EXPECT_NE(config.plan.layer(3).attention(), nullptr);
  EXPECT_NE(config.plan.layer(0).moe(), nullptr);

  const TempFolder folder;
  demo::write_byte_tokenizer(folder.path.string());
  std::ofstream(folder.path / "config.json") << config.json.dump();
  const auto tokenizer = formats::Tokenizer::from_directory(folder.path.string());
  std::string bytes;
  for (int c = 1; c < 128; ++c) bytes += static_cast<char>(c);
  const auto ids = tokenizer.encode(bytes + "é");
  ASSERT_EQ(ids.size(), 129U);
  for (std::size_t i = 0; i < 127; ++i) EXPECT_EQ(ids[i], static_cast<std::int32_t>(i) + 1);
  EXPECT_EQ(ids[127], 0xC3);
  EXPECT_EQ(ids[128], 0xA9);
  EXPECT_EQ(tokenizer.eos_ids(), std::vector<formats::TokenId>{10});
  EXPECT_EQ(tokenizer.vocabulary_size(), 256);
}

}  // namespace
}  // namespace mlxtape::test
