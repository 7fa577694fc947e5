// Ctrl-C, SIGTERM and SIGHUP while work is under way: the first asks it to stop, the second Ctrl-C or SIGTERM ends the
// program at once. SIGHUP that was ignored from the start (nohup) stays so.
//
//   const Interrupts interrupts("stopping after this step");
//   hooks.stop = [] { return Interrupts::asked(); };
//   ...
//   if (Interrupts::asked()) throw Exit{kInterrupted};
#pragma once

namespace mlxtape::cli {

// From the beginning to the end of its life signals are ours; before and after they are what they were. One at a time.
class Interrupts {
 public:
  // What the first signal says, on a line "mlxtape: <says>; press Ctrl-C again to quit at once". Empty: it says nothing.
  explicit Interrupts(const char* says);
  ~Interrupts();
  Interrupts(const Interrupts&) = delete;
  Interrupts& operator=(const Interrupts&) = delete;

  static bool asked();
  static int signal();   // the first that came; 0: none
  static void forget();  // as if none had come
};

}  // namespace mlxtape::cli
