"""NIXL: reads peers' GPU or host memory over NVLink, RDMA, shared memory or TCP, whatever UCX finds."""
