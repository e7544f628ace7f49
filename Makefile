# Moult: the only build file.  `make` leaves the program at build/moult.
#
#   make [SAN=address,undefined|thread] [CC=clang] [CUDA=0]   build
#   make CC=aarch64-linux-gnu-gcc PKG_CONFIG=... OUT=build/arm64   cross build (CONTRIBUTING.md)
#   make check                                                all tests of this machine
#   make lib                                                  build/libmoult.so (include/moult_moe.h)
#   make install PREFIX=/usr/local DESTDIR=                   program, man page, completion, library
#
#   make check-cuda                                           tests that need a GPU
#
# Each configuration has its own folder (build/, build/address,undefined/, ...), so that objects of
# two never mix.  CUDA=1 is the default where nvcc is found: kernels are compiled for sm_90a and embedded.
# The binary opens the driver at run time and works without one, and without a GPU.
SHELL   := /bin/bash
ifeq ($(origin CC),default)
CC      := gcc
endif
PREFIX  ?= /usr/local
SAN     ?=
NVCC    ?= $(firstword $(shell command -v nvcc) $(wildcard /usr/local/cuda/bin/nvcc))
CUDA    ?= $(if $(NVCC),1,0)
OUT     := build$(if $(SAN),/$(SAN))$(if $(REF),/ref)

PKG_CONFIG ?= pkg-config
PKGS    := libmicrohttpd jansson libpcre2-8 libutf8proc libxxhash nettle libzstd libcurl
PKG_CF  := $(shell $(PKG_CONFIG) --cflags $(PKGS) 2>/dev/null)
PKG_LD  := $(shell $(PKG_CONFIG) --libs libmicrohttpd jansson libpcre2-8 libutf8proc nettle libzstd 2>/dev/null)

WARN    := -Wall -Wextra -Wshadow -Wstrict-prototypes -Wmissing-prototypes -Wvla -Wundef \
           -Wwrite-strings -Wpointer-arith -Wformat=2 -Wdouble-promotion
# -ffp-contract=off: the bits are ours to choose; every fused multiply-add is written as one.
CFLAGS  ?= -O2 -g
ALL_CF  := -std=c17 -D_GNU_SOURCE -Isrc -Iinclude -pthread -ffp-contract=off -fno-strict-aliasing $(WARN) $(WERROR) \
           $(if $(SAN),-fsanitize=$(SAN) -fno-omit-frame-pointer -fno-sanitize-recover=undefined) \
           $(if $(REF),-DMOULT_REFERENCE_F32) $(PKG_CF) $(CFLAGS)
LIBS    := $(PKG_LD) -lm -ldl -pthread

SRC     := $(sort $(wildcard src/*/*.c src/*/*/*.c))
ifeq ($(CUDA),1)
SRC     := $(filter-out %/cuda/absent.c,$(SRC))
KERNELS := $(sort $(wildcard src/backend/cuda/*.cu))
FATBINS := $(KERNELS:src/backend/cuda/%.cu=build/cuda/%.fatbin)
MODULES := $(OUT)/obj/cuda-modules.o
else
SRC     := $(filter-out $(filter-out %/absent.c %/layout_cuda.c,$(wildcard src/*/cuda/*.c)),$(SRC))
endif
OBJ     := $(SRC:src/%.c=$(OUT)/obj/%.o) $(OUT)/obj/server/page.o $(MODULES)
ifdef REF # what rounds lies in these two; the rest is taken from the build beside it
PLAIN   := build$(if $(SAN),/$(SAN))
SHARED  := $(patsubst $(OUT)/%,$(PLAIN)/%,$(filter-out $(OUT)/obj/backend/% $(OUT)/obj/model/% $(MODULES),$(OBJ)))
OBJ     := $(filter $(OUT)/obj/backend/% $(OUT)/obj/model/% $(MODULES),$(OBJ)) $(SHARED)
$(SHARED): shared-objects ;
shared-objects:
	@$(MAKE) --no-print-directory REF= OUT=$(PLAIN) objects
endif
LIBOBJ  := $(filter-out $(OUT)/obj/cli/main.o,$(OBJ))
TESTS   := $(patsubst test/unit/%.c,$(OUT)/test/%,$(sort $(wildcard test/unit/test_*.c)))
ARCH    := $(shell $(CC) -dumpmachine | cut -d- -f1)

.DEFAULT_GOAL := all
all: $(OUT)/moult
objects: $(OBJ)

SERVED  := $(if $(SAN),$(patsubst $(OUT)/obj/backend/cpu/kernels_%,$(OUT)/bare/backend/cpu/kernels_%,$(OBJ)),$(OBJ))
$(OUT)/moult: $(SERVED)
	$(CC) $(ALL_CF) -o $@ $^ $(LIBS)

# The units of one instruction set carry its flags; the rest is built for the base architecture.
ifeq ($(ARCH),x86_64)
%/base/digest_avx2.o: ISA := -mavx2
%/cpu/kernels_avx2.o: ISA := -mavx2 -mfma -mf16c
%/cpu/kernels_avx512.o: ISA := -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512bf16 -mavx512vnni -mfma
endif

# Encoding gains a factor of two from vectorized loops, which gcc 12 leaves alone at -O2.
$(OUT)/obj/format/encode_%.o: ISA := $(if $(SAN),,-O3)

$(OUT)/obj/%.o: src/%.c $(OUT)/flags
	@mkdir -p $(@D)
	$(CC) $(ALL_CF) $(ISA) $(BARE) -MMD -MP -c -o $@ $<

# Unit tests have the CPU's kernels under the sanitizers; the program, whose tests compute far more, has them bare.
$(OUT)/bare/%.o: src/%.c $(OUT)/flags
	@mkdir -p $(@D)
	$(CC) $(ALL_CF) $(ISA) -O2 -fno-sanitize=all -MMD -MP -c -o $@ $<

# The page at /, embedded as it is (server/page.h).
$(OUT)/obj/server/page.o: src/server/page.html
	@mkdir -p $(@D)
	@printf '%s\n' '.section .note.GNU-stack,"",%progbits' '.section .rodata' '.globl page_html, page_html_end' \
	    'page_html: .incbin "$<"' 'page_html_end: .byte 0' | $(CC) -x assembler -c -o $@ -

# Kernels: one fatbin a .cu file, the same for every configuration of the host code; modules.S embeds
# them as the table cuda_modules (backend/cuda/driver.h).
NVCC_CF := -std=c++17 -Isrc -gencode=arch=compute_90a,code=sm_90a -O3 --fmad=true -Xptxas -v,-warn-spills -Xfatbin -compress-all
build/cuda/%.fatbin: src/backend/cuda/%.cu
	@mkdir -p $(@D)
	$(NVCC) $(NVCC_CF) -MMD -MP -MT $@ -MF $(@:.fatbin=.d) -fatbin -o $@ $< 2>build/cuda/$*.log || { cat build/cuda/$*.log; exit 1; }
build/cuda/modules.S: $(FATBINS) Makefile
	@{ echo '.section .note.GNU-stack,"",%progbits'; echo '.section .rodata'; for f in $(FATBINS:build/cuda/%.fatbin=%); do \
	    printf '.balign 16\n%s_start: .incbin "build/cuda/%s.fatbin"\n%s_name: .asciz "%s"\n' $$f $$f $$f $$f; done; \
	  printf '.section .data.rel.ro,"aw"\n.balign 8\n.globl cuda_modules\n.hidden cuda_modules\ncuda_modules:\n'; \
	  for f in $(FATBINS:build/cuda/%.fatbin=%); do echo ".quad $${f}_name, $${f}_start"; done; echo '.quad 0, 0'; } >$@
$(OUT)/obj/cuda-modules.o: build/cuda/modules.S
	@mkdir -p $(@D)
	$(CC) -c -o $@ $<

# The library: formats, kernels and the MoE operator, position-independent; only moult_* is exported.
LIBMOE  := $(wildcard src/format/*.c src/backend/*.c src/backend/cpu/*.c) \
           src/base/err.c src/base/mem.c src/base/pages.c src/base/pool.c src/model/route.c $(wildcard src/model/moe_*.c) \
           $(if $(filter 1,$(CUDA)),$(patsubst %,src/backend/cuda/%.c,device queue memory gemm gemm_few kernels repack layout_cuda slot) \
           $(wildcard src/model/cuda/moe_*.c),src/model/cuda/absent.c)
PICOBJ  := $(LIBMOE:src/%.c=$(OUT)/pic/%.o)
$(OUT)/pic/%.o: src/%.c $(OUT)/flags
	@mkdir -p $(@D)
	$(CC) $(ALL_CF) $(ISA) -fPIC -fvisibility=hidden -MMD -MP -c -o $@ $<
$(OUT)/libmoult.so: $(PICOBJ) $(MODULES)
	$(CC) $(ALL_CF) -shared -Wl,-soname,libmoult.so.1 $(if $(SAN),,-Wl,-z,defs) -o $@ $^ -lm -ldl -pthread
lib: $(OUT)/libmoult.so

# What tests, tools and benches link: of all objects, those that they use.
LIB_A   := $(OUT)/libmoult.a
$(LIB_A): $(LIBOBJ)
	@rm -f $@
	@$(AR) rcsT $@ $^

$(OUT)/test/%: test/unit/%.c $(LIB_A) $(OUT)/flags
	@mkdir -p $(@D)
	$(CC) $(ALL_CF) -Itest -MMD -MP -o $@ $< $(LIB_A) $(LIBS) -lcmocka

$(OUT)/flags: FORCE
	@mkdir -p $(@D)
	@echo '$(CC) $(ALL_CF)' | cmp -s - $@ || echo '$(CC) $(ALL_CF)' > $@

tests: $(TESTS)
# One test program after another, from the root of the repository; each prints cmocka's summary.
# RUN is a program that runs them (an emulator).
unit: $(TESTS)
	@set -e; for t in $(TESTS); do t0=$$SECONDS; echo "== $$t"; $(RUN) $$t; echo "== $$((SECONDS - t0)) s"; done

# Those in which threads meet, for SAN=thread.
TSAN_TESTS := $(addprefix $(OUT)/test/,test_base test_engine test_versions test_updates)
tsan-tests: $(TSAN_TESTS)
tsan-unit: $(TSAN_TESTS)
	@set -e; for t in $(TSAN_TESTS); do echo "== $$t"; $$t; done

# Tests of the GPU.  They link what they use and no more, so that they run where only the driver,
# libc and libcmocka are (tools/carry-cuda).  A machine without a GPU skips them.
CUDA_TESTS := $(patsubst test/cuda/%.c,$(OUT)/test-cuda/%,$(sort $(wildcard test/cuda/test_*.c)))
$(OUT)/test-cuda/%: test/cuda/%.c $(LIB_A) $(OUT)/flags
	@mkdir -p $(@D)
	$(CC) $(ALL_CF) -Itest -MMD -MP -o $@ $< $(LIB_A) -Wl,--as-needed $(LIBS) -lcmocka
cuda-tests: $(CUDA_TESTS)
CUDA_BENCHES := $(if $(filter 1,$(CUDA)),$(patsubst bench/%.c,$(OUT)/bench/%,$(sort $(wildcard bench/bench_cuda*.c))))
$(CUDA_BENCHES): $(OUT)/bench/%: bench/%.c $(LIB_A) $(OUT)/flags
	@mkdir -p $(@D)
	$(CC) $(ALL_CF) -Itest -MMD -MP -o $@ $< $(LIB_A) -Wl,--as-needed $(LIBS)
cuda-benches: $(CUDA_BENCHES)
# Tests of the model and the engine, which run on the host or, told so, on the GPU.
MODEL_TESTS := $(addprefix $(OUT)/test/,test_reference test_invariance test_engine test_overlap test_routing test_control test_act_device)
UPDATE_TESTS := $(addprefix $(OUT)/test/,test_updates test_session test_quantized_update test_faults)
model-tests: $(MODEL_TESTS) $(UPDATE_TESTS)
check-cuda: $(if $(filter 1,$(CUDA)),$(CUDA_TESTS) $(MODEL_TESTS) $(UPDATE_TESTS) $(OUT)/moult $(OUT)/libmoult.so)
	@[ $(CUDA) = 1 ] || { echo 'check-cuda needs CUDA=1, and that needs nvcc'; exit 1; }
	@set -e; for t in $(CUDA_TESTS); do echo "== $$t"; $$t; done
	@set -e; for t in $(MODEL_TESTS); do echo "== $$t, on the GPU"; MOULT_TEST_DEVICE=cuda $$t; done
	@set -e; for where in device host; do for t in $(UPDATE_TESTS); do echo "== $$t, staged on the $$where"; \
	    MOULT_TEST_DEVICE=cuda MOULT_TEST_STAGING=$$where $$t; done; done
	MOULT_LIB=$(OUT)/libmoult.so $(PY) test/python/test_moult_cuda.py
	$(PY) test/server/run.py test_check_gpu test_choice test_plan test_modes test_release
	@tools/sanitize-cuda $(OUT)/test-cuda

# Small programs that tests drive (oracles in other languages).
TOOLS   := $(patsubst test/tools/%.c,$(OUT)/tools/%,$(sort $(wildcard test/tools/*.c)))
tools: $(TOOLS)
$(OUT)/tools/%: test/tools/%.c $(LIB_A) $(OUT)/flags
	@mkdir -p $(@D)
	$(CC) $(ALL_CF) -Itest -MMD -MP -o $@ $< $(LIB_A) $(LIBS)

# Documents written from tables of the source; a test compares them.
docs: $(OUT)/tools/formatdoc
	@mkdir -p docs
	$< > docs/formats.md

# Fuzzers: one per parser, built by clang with all the code under the sanitizers.
FUZZERS := $(patsubst fuzz/%.c,build/fuzz/%,$(sort $(wildcard fuzz/fuzz_*.c)))
FUZZ_S  ?= 6
FUZZ_SAN := fuzzer-no-link,address,undefined
FUZZ_A  := build/$(FUZZ_SAN)/libmoult.a
ifneq ($(SAN),$(FUZZ_SAN)) # there it is $(LIB_A)
$(FUZZ_A): $(filter-out src/cli/main.c,$(SRC)) $(wildcard src/*/*.h src/*/*/*.h)
	@$(MAKE) --no-print-directory CC=clang SAN=$(FUZZ_SAN) CFLAGS='-O1 -g' fuzz-lib
endif
build/fuzz/%: fuzz/%.c $(wildcard fuzz/*.h) $(FUZZ_A)
	@mkdir -p $(@D)
	clang -std=c17 -D_GNU_SOURCE -Isrc -pthread -g -O1 $(WARN) -fsanitize=fuzzer,address,undefined \
	    $(PKG_CF) -o $@ $< $(FUZZ_A) $(LIBS)
fuzz-lib: $(LIB_A)
# No fuzzer computes.
ifeq ($(SAN),$(FUZZ_SAN))
$(OUT)/obj/backend/%.o: BARE := -fno-sanitize=all
endif
fuzz: $(FUZZERS)
	@set -e; for f in $(FUZZERS); do n=$$(basename $$f); echo "== $$n"; \
	    mkdir -p build/corpus/$$n; seeds=; [ -d fuzz/corpus/$$n ] && seeds=fuzz/corpus/$$n; \
	    $$f -max_total_time=$(FUZZ_S) -timeout=10 -rss_limit_mb=2048 -verbosity=0 -print_final_stats=1 \
	        build/corpus/$$n $$seeds >build/fuzz/$$n.log 2>&1 || { tail -40 build/fuzz/$$n.log; exit 1; }; grep number_of_executed build/fuzz/$$n.log; done

# Benches are printed, never tested; bench/README.md says how to read them.
$(OUT)/bench/%: bench/%.c $(LIB_A) $(OUT)/flags
	@mkdir -p $(@D)
	$(CC) $(ALL_CF) -Itest -MMD -MP -o $@ $< $(LIB_A) $(LIBS)
bench: $(OUT)/bench/bench_model $(OUT)/bench/bench_moe
	$(OUT)/bench/bench_moe
	$(OUT)/bench/bench_model models/tiny-moe
	$(OUT)/bench/bench_model random

layers:
	tools/check_layers

# Everything this machine can test.  PY is a Python with the peers of test/requirements.txt; without
# them those tests say what they skip.
PY      ?= python3
check:
	@tools/check
check-quick: layers all tests unit

LIBDIR  ?= $(PREFIX)/lib
# The program writes them from its own tables of commands and flags.
$(OUT)/moult.1: $(OUT)/moult
	$(RUN) $< help --man >$@
$(OUT)/moult.bash: $(OUT)/moult
	$(RUN) $< help --bash >$@

install: $(OUT)/moult $(OUT)/libmoult.so $(OUT)/moult.1 $(OUT)/moult.bash
	install -Dm755 $(OUT)/moult $(DESTDIR)$(PREFIX)/bin/moult
	install -Dm644 $(OUT)/moult.1 $(DESTDIR)$(PREFIX)/share/man/man1/moult.1
	install -Dm644 $(OUT)/moult.bash $(DESTDIR)$(PREFIX)/share/bash-completion/completions/moult
	install -Dm755 $(OUT)/libmoult.so $(DESTDIR)$(LIBDIR)/libmoult.so.1
	ln -sf libmoult.so.1 $(DESTDIR)$(LIBDIR)/libmoult.so
	install -Dm644 include/moult_moe.h $(DESTDIR)$(PREFIX)/include/moult_moe.h
	@mkdir -p $(DESTDIR)$(LIBDIR)/pkgconfig
	printf '%s\n' 'prefix=$(PREFIX)' 'libdir=$(LIBDIR)' 'includedir=$${prefix}/include' '' \
	    'Name: moult' 'Description: routed mixture-of-experts layer' 'Version: 1' \
	    'Cflags: -I$${includedir}' 'Libs: -L$${libdir} -lmoult' \
	    > $(DESTDIR)$(LIBDIR)/pkgconfig/moult.pc

clean:
	rm -rf build

.PHONY: all objects shared-objects lib tests unit tsan-tests tsan-unit tools docs cuda-tests model-tests cuda-benches check-cuda fuzz fuzz-lib layers bench check check-quick install clean FORCE
-include $(OBJ:.o=.d) $(SERVED:.o=.d) $(PICOBJ:.o=.d) $(TESTS:=.d) $(TOOLS:=.d) $(CUDA_TESTS:=.d) $(FATBINS:.fatbin=.d)
