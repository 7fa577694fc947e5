#include "svg.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>

#include "base/human.h"

namespace mlxtape::demo {

namespace {

constexpr int kLines = 5;  // of a chart's grid, about

std::string number(double value) { return short_number(std::round(value * 10) / 10); }

std::string text_at(double x, double y, const char* anchor, const char* kind,
                    const std::string& text) {
  return "<text x=\"" + number(x) + "\" y=\"" + number(y) + "\" text-anchor=\"" + anchor +
         "\" class=\"" + kind + "\">" + escaped(text) + "</text>\n";
}

std::string line(double x1, double y1, double x2, double y2, const char* kind) {
  return "<line x1=\"" + number(x1) + "\" y1=\"" + number(y1) + "\" x2=\"" + number(x2) +
         "\" y2=\"" + number(y2) + "\" class=\"" + kind + "\"/>\n";
}

std::string begin(double width, double height, const std::string& title) {
  return "<svg viewBox=\"0 0 " + number(width) + " " + number(height) +
         "\" role=\"img\" aria-label=\"" + escaped(title) + "\">\n";
}

std::string colour(int series) { return "s" + std::to_string(series); }

// Where values stand on a page.
struct Scale {
  double low = 0, high = 1, from = 0, to = 1;
  bool is_log = false;
  double operator()(double value) const {
    const auto place = [&](double v) {
      return is_log ? std::log10(v) : v;
    };
    return from + (to - from) * (place(value) - place(low)) / (place(high) - place(low));
  }
  std::vector<double> marks(int count) const {
    if (!is_log) return ticks(low, high, count);
    const bool is_short = high < 150 * low;  // two powers of ten: 2 and 5 between them too
    std::vector<double> all;
    const int powers = static_cast<int>(std::lround(std::log10(high / low)));
    for (int i = 0; i <= powers; ++i) {
      const double power = low * std::pow(10, i);
      all.push_back(power);
      for (const double times : {2.0, 5.0}) {
        if (is_short && times * power < high) all.push_back(times * power);
      }
    }
    return all;
  }
};

struct Range {
  double low = INFINITY, high = -INFINITY;
  void add(double value) {
    low = std::min(low, value);
    high = std::max(high, value);
  }
};

Scale y_scale(const std::vector<Series>& series, const ChartOptions& o) {
  Range range;
  for (const Series& one : series) {
    for (const auto& [x, y] : one.points) {
      if (!o.log_y || y > 0) range.add(y);
    }
  }
  if (o.y_low < o.y_high) range = {o.y_low, o.y_high};
  if (range.low > range.high) range = {o.log_y ? 0.1 : 0, 1};
  Scale scale;
  scale.is_log = o.log_y;
  if (o.log_y) {
    // Whole powers of ten: an axis needs two of them to be read.
    scale.low = std::pow(10, std::floor(std::log10(range.low)));
    scale.high = std::pow(10, std::ceil(std::log10(range.high)));
    if (scale.low == scale.high) scale.high *= 10;
  } else {
    scale.low = o.y_low < o.y_high ? o.y_low : std::min(0.0, range.low);
    scale.high = range.high > scale.low ? range.high : scale.low + 1;
    // Up to a line of the grid.
    const std::vector<double> marks = ticks(scale.low, scale.high, kLines);
    if (marks.size() > 1 && marks.back() < scale.high) {
      scale.high = marks.back() + (marks[1] - marks[0]);
    }
  }
  return scale;
}

std::string path_of(const Series& one, const Scale& x, const Scale& y) {
  std::string path;
  for (const auto& [a, b] : one.points) {
    if (y.is_log && b <= 0) continue;
    path += (path.empty() ? "M" : "L") + number(x(a)) + " " + number(y(b));
  }
  return "<path d=\"" + path + "\" class=\"curve " + colour(one.colour) + "\"/>\n";
}

}  // namespace

std::string escaped(const std::string& text) {
  std::string out;
  for (const char c : text) {
    switch (c) {
      case '&': out += "&amp;"; break;
      case '<': out += "&lt;"; break;
      case '>': out += "&gt;"; break;
      case '"': out += "&quot;"; break;
      default: out += c;
    }
  }
  return out;
}

std::vector<double> ticks(double low, double high, int count) {
  const double rough = (high - low) / count;
  if (!(rough > 0) || !std::isfinite(rough)) return {low};
  const double power = std::pow(10, std::floor(std::log10(rough)));
  double step = 10 * power;
  for (const double times : {1.0, 2.0, 5.0}) {
    if (times * power >= rough * 0.9999) {
      step = times * power;
      break;
    }
  }
  std::vector<double> all;
  const auto first = static_cast<std::int64_t>(std::ceil(low / step - 1e-9));
  const auto last = static_cast<std::int64_t>(std::floor(high / step + 1e-9));
  for (std::int64_t i = first; i <= last; ++i) all.push_back(static_cast<double>(i) * step);
  return all;
}

std::string short_number(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.4g", value == 0 ? 0 : value);
  if (std::string(text).find('e') != std::string::npos) {
    std::snprintf(text, sizeof text, std::abs(value) < 1 ? "%.6f" : "%.0f", value);
  }
  return text;
}

std::string line_chart(const std::vector<Series>& series, const ChartOptions& o) {
  const double left = 62, right = 14, top = 12;
  const bool has_legend = std::any_of(series.begin(), series.end(),
                                      [](const Series& one) { return !one.name.empty(); });
  const double bottom = has_legend ? 66 : 46;
  Range xs;
  for (const Series& one : series) {
    for (const auto& [x, y] : one.points) xs.add(x);
  }
  if (!(xs.low < xs.high)) xs = {0, std::max(1.0, std::isfinite(xs.high) ? xs.high : 1.0)};
  const Scale x{std::min(0.0, xs.low), xs.high, left, o.width - right};
  Scale y = y_scale(series, o);
  y.from = o.height - bottom;
  y.to = top;

  std::string out = begin(o.width, o.height, o.title);
  for (const double mark : y.marks(kLines)) {
    out += line(left, y(mark), o.width - right, y(mark), "grid");
    out += text_at(left - 7, y(mark) + 4, "end", "tick", short_number(mark));
  }
  for (const double mark : x.marks(6)) {
    out += line(x(mark), y.from, x(mark), y.from + 4, "axis");
    out += text_at(x(mark), y.from + 17, "middle", "tick", short_number(mark));
  }
  out += line(left, y.from, o.width - right, y.from, "axis");
  out += text_at((left + o.width - right) / 2, y.from + 35, "middle", "label", o.x_label);
  out += "<text transform=\"translate(14 " + number((y.from + y.to) / 2) +
         ") rotate(-90)\" text-anchor=\"middle\" class=\"label\">" + escaped(o.y_label) +
         "</text>\n";
  for (const Series& one : series) out += path_of(one, x, y);
  double at = left;
  const double step = (o.width - right - left) / static_cast<double>(series.size());
  for (const Series& one : series) {
    if (one.name.empty()) continue;
    out += "<rect x=\"" + number(at) + "\" y=\"" + number(o.height - 15) +
           "\" width=\"10\" height=\"10\" rx=\"2\" class=\"fill " + colour(one.colour) + "\"/>\n";
    out += text_at(at + 14, o.height - 6, "start", "tick", one.name);
    at += step;
  }
  return out + "</svg>\n";
}

std::string bar_chart(const std::vector<Bar>& bars, const std::string& title, double width,
                      double names) {
  constexpr double kRow = 24, kThick = 14, kValues = 112;
  double longest = 0;
  for (const Bar& bar : bars) longest = std::max(longest, bar.length);
  const double room = width - names - kValues;
  std::string out = begin(width, kRow * static_cast<double>(bars.size()) + 4, title);
  double y = 2;
  for (const Bar& bar : bars) {
    const double length = longest > 0 ? std::max(1.0, room * bar.length / longest) : 1;
    out += text_at(names - 8, y + kRow / 2 + 4, "end", "tick", bar.name);
    out += "<rect x=\"" + number(names) + "\" y=\"" + number(y + (kRow - kThick) / 2) +
           "\" width=\"" + number(length) + "\" height=\"" + number(kThick) +
           "\" rx=\"2\" class=\"fill " + colour(bar.colour) + "\"/>\n";
    out += text_at(names + length + 7, y + kRow / 2 + 4, "start", "value", bar.value);
    y += kRow;
  }
  return out + "</svg>\n";
}

std::string heat_map(const std::vector<std::vector<double>>& shares, const std::string& row_name,
                     const std::string& column_name, double width) {
  constexpr double kLeft = 132, kTop = 26, kRow = 34;
  double most = 0;
  std::size_t columns = 1;
  for (const auto& row : shares) {
    columns = std::max(columns, row.size());
    for (const double share : row) most = std::max(most, share);
  }
  const double cell = (width - kLeft) / static_cast<double>(columns);
  std::string out = begin(width, kTop + kRow * static_cast<double>(shares.size()) + 4,
                          column_name + " by " + row_name);
  out += text_at(kLeft - 10, 16, "end", "label", column_name);
  for (std::size_t c = 0; c < columns; ++c) {
    out += text_at(kLeft + cell * (static_cast<double>(c) + 0.5), 16, "middle", "tick",
                   std::to_string(c));
  }
  double y = kTop;
  for (std::size_t r = 0; r < shares.size(); ++r, y += kRow) {
    out +=
        text_at(kLeft - 10, y + kRow / 2 + 4, "end", "label", row_name + " " + std::to_string(r));
    for (std::size_t c = 0; c < shares[r].size(); ++c) {
      const double x = kLeft + cell * static_cast<double>(c);
      const double strength = most > 0 ? shares[r][c] / most : 0;
      out += "<rect x=\"" + number(x + 1) + "\" y=\"" + number(y + 1) + "\" width=\"" +
             number(cell - 2) + "\" height=\"" + number(kRow - 2) +
             "\" rx=\"3\" class=\"fill s0\" fill-opacity=\"" + fixed(0.04 + 0.86 * strength, 2) +
             "\"/>\n";
      out += text_at(x + cell / 2, y + kRow / 2 + 4, "middle", strength > 0.55 ? "on" : "value",
                     fixed(100 * shares[r][c], 1));
    }
  }
  return out + "</svg>\n";
}

}  // namespace mlxtape::demo
