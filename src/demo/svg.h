// Charts as SVG text for a page: colours and fonts are the page's classes and variables, so that they follow its light and
// dark.
//
// Classes    axis (lines), grid, tick (text), label (text), value (text), s0 … s5 (series: --s0 … --s5)
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace mlxtape::demo {

// Text in HTML and SVG.
std::string escaped(const std::string& text);

// Round numbers from low to high, about count of them: 1, 2 or 5 times a power of ten apart.
std::vector<double> ticks(double low, double high, int count);
// "1500", "0.02": as short as it is exact to 4 digits.
std::string short_number(double value);

struct Series {
  std::string name;  // empty: no legend
  std::vector<std::pair<double, double>> points;
  int colour = 0;
};

struct ChartOptions {
  std::string title, x_label, y_label;
  bool log_y = false;
  double y_low = 0, y_high = 0;  // equal: of the points, 0 among them where log_y is off
  double width = 460, height = 300;
};
// Points that are not positive have no place with log_y and are left out.
std::string line_chart(const std::vector<Series>& series, const ChartOptions& options);

struct Bar {
  std::string name, value;  // as it is written
  double length = 0;
  int colour = 0;
};
// Lying, one below the other, the longest as wide as there is room.
std::string bar_chart(const std::vector<Bar>& bars, const std::string& title, double width = 460,
                      double names = 130);

// Cells from white to the colour of the largest, percent in each.
std::string heat_map(const std::vector<std::vector<double>>& shares, const std::string& row_name,
                     const std::string& column_name, double width = 940);

}  // namespace mlxtape::demo
