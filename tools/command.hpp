// One command of `fovea`: its page of help, its options, its run.
#pragma once

#include <string>
#include <vector>

namespace fovea::tools {

/// Each takes the words behind its name and returns an exit code; what is wrong is thrown (see run_fovea).
int run_attend(const std::vector<std::string>& words);
int run_decode(const std::vector<std::string>& words);
int run_bench(const std::vector<std::string>& words);
int run_tune(const std::vector<std::string>& words);
int run_explain(const std::vector<std::string>& words);
int run_calibrate(const std::vector<std::string>& words);
int run_draw_mask(const std::vector<std::string>& words);
int run_pack(const std::vector<std::string>& words);
int run_cache(const std::vector<std::string>& words);
int run_doctor(const std::vector<std::string>& words);

/// The whole command line without the program's name. Prints one line on stderr where something is wrong.
int run_fovea(const std::vector<std::string>& words);

}  // namespace fovea::tools
