# Two targets: `docker build --target service .` serves HTTP; `--target worker` has torch for probes beside a GPU.
FROM python:3.11-slim AS base
ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1
WORKDIR /srv/planner
COPY pyproject.toml setup.py MANIFEST.in README.md constraints.txt alembic.ini ./
COPY planner planner
COPY api api
COPY probes probes
COPY alembic alembic
RUN pip install --constraint constraints.txt '.[postgres]' && useradd --create-home planner
USER planner

FROM base AS service
EXPOSE 8000
HEALTHCHECK CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/healthz')"]
# PLANNER_API_KEYS is required: the service refuses to listen beyond loopback without keys.
CMD ["planner-cli", "serve", "--host", "0.0.0.0", "--port", "8000"]

FROM base AS worker
USER root
RUN pip install --constraint constraints.txt '.[postgres,probe]'
USER planner
CMD ["planner-cli", "doctor"]
