// The page of a demo's run: one HTML file that needs nothing else: no script, no network, light or dark as the reader's
// system is.
#pragma once

#include <string>

#include "demo_result.h"

namespace mlxtape::demo {

std::string report_page(const DemoResult& result);

}  // namespace mlxtape::demo
