# Three targets, `docker build --target NAME .`: `service` answers HTTP and needs no torch; `worker` runs the probes, studies and sweeps
# that its database holds; `probe` measures one job. The last two have torch and want a GPU (`docker run --gpus all`), and an init
# (`--init`) that buries what a killed probe leaves.
# The tag's multi-platform index as Docker Hub listed it on 2026-09-21; a newer one: docker buildx imagetools inspect python:3.11-slim-bookworm
FROM python:3.11.16-slim-bookworm@sha256:a36c24f9cbdf4fd0f52d67f0823eeac19c2028c637cecc392d97f980d4fec56b AS base
ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1
WORKDIR /srv/planner
COPY pyproject.toml setup.py MANIFEST.in LICENSE README.md alembic.ini ./
COPY hashes hashes
COPY planner planner
COPY api api
COPY probes probes
COPY alembic alembic
RUN pip install --require-hashes --requirement hashes/service.txt \
    && pip install --no-deps --no-build-isolation . \
    && useradd --create-home planner
USER planner

FROM base AS service
EXPOSE 8000
HEALTHCHECK --interval=30s --timeout=5s --start-period=30s --retries=3 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/healthz', timeout=4)"]
# PLANNER_API_KEYS is required: the service refuses to listen beyond loopback without keys.
CMD ["planner-cli", "serve", "--host", "0.0.0.0", "--port", "8000"]

FROM base AS with-torch
USER root
# torch.compile builds the code that starts its kernels; Python's headers are in the image
RUN apt-get update && apt-get install --yes --no-install-recommends gcc g++ libc6-dev && rm -rf /var/lib/apt/lists/*
RUN pip install --require-hashes --requirement hashes/probe.txt
USER planner

# PLANNER_DATABASE_URL names the service's database. A service beside it is started with PLANNER_PROBE_WORKERS=0 PLANNER_TASK_WORKERS=0.
FROM with-torch AS worker
STOPSIGNAL SIGTERM
CMD ["planner-cli", "worker"]

FROM with-torch AS probe
ENTRYPOINT ["planner-cli", "probe"]
CMD ["--help"]
