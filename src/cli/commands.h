/* commands.h - the subcommands; each takes the words after its name and returns the exit status. */
#ifndef CLI_COMMANDS_H
#define CLI_COMMANDS_H

#define MOULT_VERSION "0.1.0"

int cmd_serve(int argc, char **argv);
int cmd_generate(int argc, char **argv);
int cmd_inspect(int argc, char **argv);
int cmd_quantize(int argc, char **argv);
int cmd_bench_gsm8k(int argc, char **argv);

#endif
