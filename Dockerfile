# The gateway without its engines: no CUDA, no shell needed, nothing written but to /tmp.
#   docker build -t relaygen .
#   docker run --read-only --tmpfs /tmp -p 8080:8080 -v ./policies:/app/policies:ro relaygen
# With the two tiny models and llama.cpp beside it (`relaygen demo`, `relaygen engine`):
#   docker build --target demo -t relaygen-demo .

FROM python:3.12-slim AS build
WORKDIR /build
RUN python -m venv /opt/relaygen
COPY pyproject.toml README.md LICENSE ./
COPY relaygen relaygen
COPY gateway gateway
COPY policies policies
RUN /opt/relaygen/bin/pip install --no-cache-dir --disable-pip-version-check '.[otel]'

FROM build AS build-demo
RUN /opt/relaygen/bin/pip install --no-cache-dir --disable-pip-version-check '.[otel,demo]'

FROM python:3.12-slim AS base
WORKDIR /app
COPY policies policies
# Hugging Face's files (a policy with a `tokenizer` of the hub) go where it may write: mount a
# volume there to keep them.
ENV PATH=/opt/relaygen/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    HF_HOME=/tmp/huggingface \
    HEALTH_URL=http://127.0.0.1:8080/healthz
USER 10001:10001
EXPOSE 8080
STOPSIGNAL SIGTERM
# HEALTH_URL: another one where the port is another or TLS is on.
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s CMD ["python", "-c", \
    "import os, ssl, urllib.request as r; r.urlopen(os.environ['HEALTH_URL'], timeout=3, context=ssl._create_unverified_context())"]
ENTRYPOINT ["relaygen"]
CMD ["serve", "--host", "0.0.0.0"]

FROM base AS demo
COPY --from=build-demo /opt/relaygen /opt/relaygen

FROM base AS gateway
COPY --from=build /opt/relaygen /opt/relaygen
