# One image for every role: the command says which. Build it in the root of the repository:
#
#     docker build --tag trinamo .
#
# The embedded servers are not in it; see deploy/ for clusters that bring their own.

FROM python:3.12-slim AS build
WORKDIR /source
COPY . .
# An engine that runs a model needs an extra: --build-arg EXTRAS="[llamacpp]"
ARG EXTRAS="[cluster]"
RUN python -m venv /opt/trinamo \
    && /opt/trinamo/bin/pip install --no-cache-dir ".${EXTRAS}"

FROM python:3.12-slim
# A number, so that Kubernetes can see that it is not root.
RUN useradd --system --uid 10001 --no-create-home trinamo
COPY --from=build /opt/trinamo /opt/trinamo
ENV PATH="/opt/trinamo/bin:$PATH" PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 10001
ENTRYPOINT ["trinamo"]
CMD ["--help"]
