#!/usr/bin/env bash
# Build both images for all architectures, push them, and print what Helm wants to know: scripts/images.sh REGISTRY [TAG]
# REGISTRY is host/path. PLATFORMS names other architectures than amd64 and arm64.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

[ -n "${1:-}" ] || { echo "usage: make images REGISTRY=host/path [TAG=0.1.0]" >&2; exit 2; }
REGISTRY=${1%/}
VERSION=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' reducer_image/gradsharding_reducer/__init__.py)
TAG=${2:-$VERSION}
PLATFORMS=${PLATFORMS:-linux/amd64,linux/arm64}
REVISION=$(git rev-parse HEAD 2>/dev/null || echo unknown)

command -v docker >/dev/null || { echo "docker with buildx is needed: https://docs.docker.com/build/" >&2; exit 2; }
# Docker's default driver builds for one architecture only.
docker buildx inspect gradsharding >/dev/null 2>&1 || docker buildx create --name gradsharding --driver docker-container >/dev/null

# image NAME DOCKERFILE BUILD_ARG...
image() {
  local name=$1 file=$2; shift 2
  docker buildx build --builder gradsharding --platform "$PLATFORMS" --file "$file" --tag "$REGISTRY/$name:$TAG" \
    --build-arg "VERSION=$VERSION" --build-arg "REVISION=$REVISION" --push "$@" .
}

image gradsharding-operator operator/Dockerfile
image gradsharding-reducer reducer_image/Dockerfile --target knative

cat <<FLAGS

Pushed. To install:

  helm upgrade --install gradsharding helm/gradsharding -n gradsharding-system --create-namespace \\
    --set-string image.repository=$REGISTRY/gradsharding-operator,image.tag=$TAG \\
    --set-string functions.image.repository=$REGISTRY/gradsharding-reducer,functions.image.tag=$TAG
FLAGS
