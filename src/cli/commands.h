/* commands.h - the subcommands; each takes the words after its name and returns the exit status. */
#ifndef CLI_COMMANDS_H
#define CLI_COMMANDS_H

#include "cli/options.h"

#define MOULT_VERSION "0.1.0"

/* Their flags; those of serve are in serve_options.h. */
extern const struct opt_command generate_command, quantize_command, inspect_command, gsm8k_command,
    replay_command, check_gpu_command;

int cmd_serve(int argc, char **argv);
int cmd_generate(int argc, char **argv);
int cmd_inspect(int argc, char **argv);
int cmd_check_gpu(int argc, char **argv);
int cmd_quantize(int argc, char **argv);
int cmd_bench_gsm8k(int argc, char **argv);
int cmd_replay(int argc, char **argv);

#endif
