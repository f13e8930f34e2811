/* A tiled matrix product with knobs: prints its speed. Loopwright's quick start tunes it. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + 1e-9 * t.tv_nsec;
}

static int option(int argc, char **argv, const char *name, int otherwise) {
    for (int i = 1; i + 1 < argc; i++)
        if (!strcmp(argv[i], name)) return atoi(argv[i + 1]);
    return otherwise;
}

static int least(int a, int b) { return a < b ? a : b; }

int main(int argc, char **argv) {
    int n = option(argc, argv, "--size", 256), tile = option(argc, argv, "--tile", 32);
    float *a = malloc(sizeof(float) * n * n), *b = malloc(sizeof(float) * n * n), *c = calloc(n * n, sizeof(float));
    if (!a || !b || !c || tile < 1) return 1;
    for (int i = 0; i < n * n; i++) a[i] = i % 7, b[i] = i % 5;
    double start = now();
#pragma omp parallel for schedule(static)
    for (int ii = 0; ii < n; ii += tile)
        for (int kk = 0; kk < n; kk += tile)
            for (int i = ii; i < least(ii + tile, n); i++)
                for (int k = kk; k < least(kk + tile, n); k++) {
                    float x = a[i * n + k];
                    for (int j = 0; j < n; j++) c[i * n + j] += x * b[k * n + j];
                }
    double seconds = now() - start;
    printf("check: %.0f\nGFLOP/s: %.3f\n", c[n / 2], 2.0 * n * n * n / seconds / 1e9);
    return 0;
}
