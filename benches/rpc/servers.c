// Registers the RPC server that GGML_RPC_SERVER names in a program of ggml that has no flag for that, such as test-backend-ops:
//   cc -shared -fPIC -o servers.so servers.c && LD_PRELOAD=./servers.so GGML_RPC_SERVER=127.0.0.1:50052 test-backend-ops test -b RPC0
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>

__attribute__((constructor)) static void add(void) {
    const char *server = getenv("GGML_RPC_SERVER");
    void *(*add_server)(const char *) = (void *(*)(const char *))dlsym(RTLD_DEFAULT, "ggml_backend_rpc_add_server");
    void (*add_backend)(void *) = (void (*)(void *))dlsym(RTLD_DEFAULT, "ggml_backend_register");
    if (server && add_server && add_backend) {
        add_backend(add_server(server));
    }
}
