// A file that is mapped and becomes shorter: one line that names it, in place of the system's "Bus error".
#pragma once

namespace mlxtape::cli {

// From now on SIGBUS in the memory of a MappedFile ends the program with that line and kFailed. Any other does what it did.
void tell_bus_errors();

}  // namespace mlxtape::cli
