// Where commands write: what would go wrong after a long time, or would destroy something, is said at once.
#pragma once

#include <string>
#include <vector>

#include "mlxtape/models/load.h"

namespace mlxtape::cli {

// Throws kIo where a file is, or a link that leads nowhere.
void expect_directory_or_none(const std::string& path);

// Of a model's directory that is to be made. Throws kIo where something is there and force is off, or it holds anything but a
// model, or nothing can be written there. flag: the one that named it; source: the folder that its companions are to come
// from. Nothing is touched, but one that a process had moved aside when it was killed has its name again.
void expect_place(const std::string& path, bool force, const std::string& flag,
                  const std::string& source);

// Of a file that is to be made. Throws kIo where something is there and force is off, or nothing can be written there.
void expect_file_place(const std::string& path, bool force, const std::string& flag);

// Writes a model there, with the companions of the folder `source`. What has come there since expect_place is left as it
// is unless force is on. Throws kIo.
void save_result(const models::Model& model, const std::string& path, const std::string& source,
                 bool force);

// A file or folder that a flag names.
struct Place {
  std::string flag, path;
};

// Throws kArgument where the output is one of the inputs or holds one, or a file that a link in an input's folder leads to,
// by whatever links and dots it is named: writing it would take the input away. An input without a path is none.
void expect_apart(const Place& output, const std::vector<Place>& inputs);

// Takes away what a process that was killed has left of a file: <path>.tmp<process>.<number>. For folders that nobody else is
// in meanwhile (FolderLock).
void remove_half_written(const std::string& path);

// "my-model" of "models/my-model/".
std::string last_part(const std::string& path);
// The path without slashes at its end.
std::string without_slash(std::string path);

}  // namespace mlxtape::cli
