# SPDX-License-Identifier: Apache-2.0
# Targets `cpu` and `cuda` (the default); docs/docker.md says how to build and run them.
# Built with Docker and with buildah, hence neither here-documents nor `COPY --link`.

# Pin a base by its digest: --build-arg CUDA_BASE=vllm/vllm-openai:v0.33.0@sha256:...
ARG CUDA_BASE=vllm/vllm-openai:v0.33.0
# A Debian with Python 3.11 to 3.13.
ARG CPU_BASE=debian:bookworm-slim


FROM ${CPU_BASE} AS cpu-base
# torch.compile, on by default, needs the compiler and Python's headers at run time.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends \
        ca-certificates g++ libnuma1 libpython3-dev python3 \
    && rm -rf /var/lib/apt/lists/*


FROM cpu-base AS cpu-environment
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends git python3-venv \
    && rm -rf /var/lib/apt/lists/*
# Where pip finds torch's CPU build; empty where its own index has it.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ENV PYTHONDONTWRITEBYTECODE=1 VLLM_TARGET_DEVICE=cpu
RUN --mount=type=bind,target=/source \
    python3 -m venv /opt/vllm \
    && /opt/vllm/bin/pip install --no-cache-dir \
        ${TORCH_INDEX:+--extra-index-url "${TORCH_INDEX}"} /source


FROM cpu-base AS cpu
RUN useradd --uid 10001 --create-home pykvcache \
    && install --directory --owner=pykvcache --group=pykvcache /var/cache/pykvcache
COPY --from=cpu-environment /opt/vllm /opt/vllm
COPY docker/pykvcache-serve docker/pykvcache-health /usr/local/bin/
ENV PATH=/opt/vllm/bin:$PATH PYKVCACHE_ROOT=/var/cache/pykvcache HEALTH_PORT=8000
USER 10001:10001
WORKDIR /home/pykvcache
VOLUME /var/cache/pykvcache
EXPOSE 8000
HEALTHCHECK --interval=30s --timeout=10s --start-period=15m CMD ["pykvcache-health"]
ENTRYPOINT ["pykvcache-serve"]


FROM ${CUDA_BASE} AS cuda-delta
# Nothing runs in this stage.
# hadolint ignore=DL3002
USER 0
# hadolint ignore=DL3008
RUN command -v git \
    || { apt-get update && apt-get install --yes --no-install-recommends git; }
ENV PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=/source/scripts
WORKDIR /source
RUN --mount=type=bind,target=/source python3 -m distribution.delta /delta


FROM ${CUDA_BASE} AS cuda
USER 0
# The base's vLLM stays, but for the files that the distribution changes or adds.
RUN --mount=type=bind,from=cuda-delta,source=/delta,target=/delta \
    xargs --arg-file=/delta/removed rm -r \
    && cp -r /delta/tree/. / \
    && useradd --uid 10001 --create-home pykvcache \
    && install --directory --owner=pykvcache --group=pykvcache /var/cache/pykvcache
COPY docker/pykvcache-serve docker/pykvcache-health /usr/local/bin/
ENV PYKVCACHE_ROOT=/var/cache/pykvcache HEALTH_PORT=8000
USER 10001:10001
WORKDIR /home/pykvcache
VOLUME /var/cache/pykvcache
EXPOSE 8000
HEALTHCHECK --interval=30s --timeout=10s --start-period=15m CMD ["pykvcache-health"]
ENTRYPOINT ["pykvcache-serve"]
