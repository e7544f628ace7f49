#include "backend/cuda/driver.h"
#include "base/mem.h"

struct queue {
    struct device *d;
    CUstream s;
    bool borrowed;
    struct err first; /* code OK: none */
};

struct event {
    struct device *d;
    CUevent ev;
};

struct graph {
    struct device *d;
    CUgraphExec exec;
};

err_t queue_new(struct queue **out, struct device *d, struct err *e)
{
    CUstream s;
    err_t rc =
        driver_check(&d->cu, d->cu.cuStreamCreate(&s, CU_STREAM_NON_BLOCKING), e, "a stream");
    if (rc != OK) return rc;
    struct queue *q = mem_alloc(sizeof *q);
    q->d = d;
    q->s = s;
    *out = q;
    return OK;
}

void queue_free(struct queue *q)
{
    if (!q) return;
    if (!q->borrowed) {
        q->d->cu.cuStreamSynchronize(q->s);
        q->d->cu.cuStreamDestroy(q->s);
    }
    mem_free(q);
}

struct queue *queue_borrow(struct device *d)
{
    struct queue *q = mem_alloc(sizeof *q);
    q->d = d;
    q->borrowed = true;
    return q;
}

void queue_set_stream(struct queue *q, void *stream)
{
    CHECK(q->borrowed);
    q->s = stream;
}

void *queue_stream(struct queue *q)
{
    return q->s;
}

static bool failed(const struct queue *q)
{
    return q->first.code != OK;
}

static void note(struct queue *q, CUresult r, const char *what)
{
    if (r != CUDA_SUCCESS && !failed(q)) (void)!driver_check(&q->d->cu, r, &q->first, what);
}

void queue_copy(struct queue *q, uint64_t dst, uint64_t src, size_t bytes)
{
    if (failed(q) || bytes == 0) return;
    note(q, q->d->cu.cuMemcpyAsync(dst, src, bytes, q->s), "copy");
}

void queue_fill(struct queue *q, devptr_t dst, uint8_t byte, size_t bytes)
{
    if (failed(q) || bytes == 0) return;
    note(q, q->d->cu.cuMemsetD8Async(dst, byte, bytes, q->s), "fill");
}

static unsigned at_least_1(uint32_t n)
{
    return n ? n : 1;
}

void queue_launch(struct queue *q, const struct kernel *k, struct launch l, const void *args)
{
    if (failed(q)) return;
    CHECK(k->fn);
    CUlaunchAttribute attr[2];
    CUlaunchConfig c = {.gridDimX = at_least_1(l.grid[0]),
                        .gridDimY = at_least_1(l.grid[1]),
                        .gridDimZ = at_least_1(l.grid[2]),
                        .blockDimX = l.threads,
                        .blockDimY = 1,
                        .blockDimZ = 1,
                        .sharedMemBytes = l.smem ? l.smem : k->smem_bytes,
                        .hStream = q->s,
                        .attrs = attr};
    if (l.programmatic) {
        attr[c.numAttrs] =
            (CUlaunchAttribute){.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION};
        attr[c.numAttrs++].value.programmaticStreamSerializationAllowed = 1;
    }
    if (l.cluster) {
        attr[c.numAttrs] = (CUlaunchAttribute){.id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION};
        attr[c.numAttrs].value.clusterDim.x = l.cluster;
        attr[c.numAttrs].value.clusterDim.y = 1;
        attr[c.numAttrs++].value.clusterDim.z = 1;
    }
    void *params[1] = {(void *)(uintptr_t)args}; /* the driver only reads it */
    note(q, q->d->cu.cuLaunchKernelEx(&c, (CUfunction)k->fn, params, NULL), k->name);
}

void queue_record(struct queue *q, struct event *ev)
{
    if (!failed(q)) note(q, q->d->cu.cuEventRecord(ev->ev, q->s), "recording an event");
}

void queue_wait(struct queue *q, const struct event *ev)
{
    if (!failed(q)) note(q, q->d->cu.cuStreamWaitEvent(q->s, ev->ev, 0), "waiting for an event");
}

err_t queue_error(struct queue *q, struct err *e)
{
    if (!failed(q)) return OK;
    err_t rc = q->first.code;
    if (e) *e = q->first;
    q->first.code = OK;
    return rc;
}

err_t queue_sync(struct queue *q, struct err *e)
{
    note(q, q->d->cu.cuStreamSynchronize(q->s), "work on the GPU");
    return queue_error(q, e);
}

err_t event_new(struct event **out, struct device *d, bool timed, struct err *e)
{
    CUevent ev;
    unsigned flags = timed ? CU_EVENT_DEFAULT : CU_EVENT_DISABLE_TIMING;
    err_t rc = driver_check(&d->cu, d->cu.cuEventCreate(&ev, flags), e, "an event");
    if (rc != OK) return rc;
    struct event *x = mem_alloc(sizeof *x);
    x->d = d;
    x->ev = ev;
    *out = x;
    return OK;
}

void event_free(struct event *ev)
{
    if (!ev) return;
    ev->d->cu.cuEventDestroy(ev->ev);
    mem_free(ev);
}

err_t event_poll(struct event *ev, struct err *e)
{
    CUresult r = ev->d->cu.cuEventQuery(ev->ev);
    if (r == CUDA_ERROR_NOT_READY) return ERR_BUSY;
    return driver_check(&ev->d->cu, r, e, "work on the GPU");
}

err_t event_sync(struct event *ev, struct err *e)
{
    return driver_check(&ev->d->cu, ev->d->cu.cuEventSynchronize(ev->ev), e, "work on the GPU");
}

err_t event_ms(float *out, struct event *from, struct event *to, struct err *e)
{
    return driver_check(&from->d->cu, from->d->cu.cuEventElapsedTime(out, from->ev, to->ev), e,
                        "time between events");
}

void queue_capture(struct queue *q)
{
    if (failed(q)) return;
    note(q, q->d->cu.cuStreamBeginCapture(q->s, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL),
         "starting a capture");
}

err_t queue_capture_end(struct queue *q, struct graph **out, struct err *e)
{
    const struct driver *cu = &q->d->cu;
    CUgraph graph = NULL;
    CUgraphExec exec = NULL;
    note(q, cu->cuStreamEndCapture(q->s, &graph), "ending a capture");
    if (!failed(q)) note(q, cu->cuGraphInstantiateWithFlags(&exec, graph, 0), "making a graph");
    if (graph) cu->cuGraphDestroy(graph);
    if (failed(q)) return queue_error(q, e);
    struct graph *g = mem_alloc(sizeof *g);
    g->d = q->d;
    g->exec = exec;
    *out = g;
    return OK;
}

void queue_graph(struct queue *q, const struct graph *g)
{
    if (!failed(q)) note(q, q->d->cu.cuGraphLaunch(g->exec, q->s), "a graph");
}

void graph_free(struct graph *g)
{
    if (!g) return;
    g->d->cu.cuGraphExecDestroy(g->exec);
    mem_free(g);
}
