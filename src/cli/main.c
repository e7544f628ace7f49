/* main.c - the table of subcommands. */
#include "base/buf.h"
#include "base/err.h"
#include "cli/commands.h"
#include "cli/docs.h"
#include "cli/options.h"
#include "cli/serve_options.h"
#include <stdio.h>
#include <string.h>

struct command {
    const char *name;
    int (*run)(int argc, char **argv);
    const char *about;
    const struct opt_command *options; /* for the manual and the completion; NULL: none */
};

static int cmd_bench(int argc, char **argv)
{
    if (argc > 0 && strcmp(argv[0], "gsm8k") == 0) return cmd_bench_gsm8k(argc - 1, argv + 1);
    bool help = argc > 0 && (strcmp(argv[0], "--help") == 0 || strcmp(argv[0], "-h") == 0);
    fprintf(help ? stdout : stderr,
            "usage: moult bench gsm8k [flags]\n\n  gsm8k   answer grade-school problems and count "
            "the right ones\n");
    return help ? 0 : 2;
}

static int cmd_version(int argc, char **argv)
{
    (void)argc;
    (void)argv;
    printf("moult %s\n", MOULT_VERSION);
    return 0;
}

static int cmd_help(int argc, char **argv);

static const struct command commands[] = {
    {"serve", cmd_serve, "serve a model over HTTP (SGLang's and OpenAI's routes)", &serve_command},
    {"generate", cmd_generate, "generate from a prompt in this process", &generate_command},
    {"quantize", cmd_quantize, "write a model in another weight format", &quantize_command},
    {"inspect", cmd_inspect, "say what a model folder holds and what is odd about it",
     &inspect_command},
    {"check-gpu", cmd_check_gpu,
     "say what GPU there is and whether it computes as the kernels need", &check_gpu_command},
    {"bench", cmd_bench, "measure a running server", &gsm8k_command},
    {"replay", cmd_replay, "send recorded requests again and compare the answers", &replay_command},
    {"version", cmd_version, "print the version", NULL},
    {"help", cmd_help, "print this; --man: the manual page; --bash: completion for bash", NULL},
};
#define N_COMMANDS (sizeof commands / sizeof commands[0])

/* All commands as a text of docs.h. */
static int print_docs(bool man)
{
    struct doc_command docs[N_COMMANDS];
    struct buf out = {0};
    for (size_t i = 0; i < N_COMMANDS; i++)
        docs[i] = (struct doc_command){commands[i].name, commands[i].about, commands[i].options};
    if (man)
        docs_man(docs, N_COMMANDS, MOULT_VERSION, &out);
    else
        docs_bash(docs, N_COMMANDS, &out);
    bool ok = !out.failed && fwrite(out.data, 1, out.len, stdout) == out.len && fflush(stdout) == 0;
    buf_release(&out);
    if (!ok) fprintf(stderr, "moult: help: could not write\n");
    return ok ? 0 : 1;
}

static int cmd_help(int argc, char **argv)
{
    if (argc > 0) {
        if (argc == 1 && strcmp(argv[0], "--man") == 0) return print_docs(true);
        if (argc == 1 && strcmp(argv[0], "--bash") == 0) return print_docs(false);
        fprintf(stderr, "moult: help takes nothing, --man or --bash, not \"%s\"\n", argv[argc - 1]);
        return 2;
    }
    printf("moult: a server for mixture-of-experts models whose weights change while it serves\n\n"
           "usage: moult COMMAND [flags]\n\n");
    for (size_t i = 0; i < N_COMMANDS; i++)
        printf("  %-10s %s\n", commands[i].name, commands[i].about);
    printf("\nmoult COMMAND --help lists the flags of a command.\n");
    return 0;
}

int main(int argc, char **argv)
{
    if (argc < 2) {
        cmd_help(0, NULL);
        return 2;
    }
    const char *word = argv[1];
    if (strcmp(word, "--version") == 0 || strcmp(word, "-V") == 0) return cmd_version(0, NULL);
    if (strcmp(word, "--help") == 0 || strcmp(word, "-h") == 0) return cmd_help(0, NULL);
    const char *near = NULL;
    int least = 3;
    for (size_t i = 0; i < N_COMMANDS; i++) {
        if (strcmp(word, commands[i].name) == 0) return commands[i].run(argc - 2, argv + 2);
        int d = options_distance(word, commands[i].name);
        if (d < least) {
            least = d;
            near = commands[i].name;
        }
    }
    fprintf(stderr, "moult: unknown command \"%s\"%s%s%s\n", word, near ? "; did you mean " : "",
            near ? near : "", near ? "?" : "; see moult help");
    return 2;
}
