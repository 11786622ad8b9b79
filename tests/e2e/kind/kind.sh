#!/usr/bin/env bash
# A kind cluster with Knative, MinIO, both images and the chart: tests/e2e/kind/kind.sh STEP...
#
#   up     all that is needed for the samples and for `skaffold dev`
#   e2e    the end-to-end tests of what the chart installs
#   down   delete the cluster
#
# Each function below is a step too. Those that need neither Docker nor kind run on any test cluster whose nodes have the images:
# OPERATOR_IMAGE=… REDUCER_IMAGE=… MINIO_IMAGE=… kind.sh install_minio install_chart try_sample
# `up` needs docker, kind, kubectl and helm; `e2e` the project's .venv (make .venv/ready).
set -euo pipefail
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
ROOT=$(cd "$HERE/../../.." && pwd)

KNATIVE=knative-v1.21.1
KOURIER=knative-v1.21.0
CLUSTER=gradsharding-test
SYSTEM=gradsharding-system
FEDERATION=federation
# Knative looks images of this registry up nowhere, if their tag is not latest.
OPERATOR_IMAGE=${OPERATOR_IMAGE:-kind.local/gradsharding-operator:test}
REDUCER_IMAGE=${REDUCER_IMAGE:-kind.local/gradsharding-reducer:test}
MINIO_IMAGE=${MINIO_IMAGE:-kind.local/minio:test}
MINIO_KEY=minioadmin
PYTEST=${PYTEST:-$ROOT/.venv/bin/pytest}

say() { echo "kind.sh: $*" >&2; }
rolled_out() { kubectl -n "$1" rollout status --timeout=300s "${@:2}"; }

up() {
  local step
  for step in create_cluster build_images load_images install_knative install_minio install_chart; do "$step"; done
  say "ready. Try: $0 try_sample"
}

create_cluster() {
  kind get clusters 2>/dev/null | grep -qx "$CLUSTER" || kind create cluster --config "$HERE/cluster.yaml" --wait 180s
  kubectl config use-context "kind-$CLUSTER"
}

build_images() {
  docker build --file "$ROOT/operator/Dockerfile" --tag "$OPERATOR_IMAGE" "$ROOT"
  docker build --file "$ROOT/reducer_image/Dockerfile" --target knative --tag "$REDUCER_IMAGE" "$ROOT"
  docker build --tag "$MINIO_IMAGE" "$HERE/minio"
}

load_images() { kind load docker-image --name "$CLUSTER" "$OPERATOR_IMAGE" "$REDUCER_IMAGE" "$MINIO_IMAGE"; }

# Knative as its project ships it: no setting is changed but which ingress it uses.
install_knative() {
  local serving=https://github.com/knative/serving/releases/download/$KNATIVE
  local kourier=https://github.com/knative-extensions/net-kourier/releases/download/$KOURIER
  kubectl apply -f "$serving/serving-crds.yaml"
  kubectl wait --for=condition=Established --all crd --timeout=60s
  kubectl apply -f "$serving/serving-core.yaml"
  kubectl apply -f "$kourier/kourier.yaml"
  kubectl -n knative-serving patch configmap config-network --type merge \
    -p '{"data":{"ingress-class":"kourier.ingress.networking.knative.dev"}}'
  rolled_out knative-serving deployment
  rolled_out kourier-system deployment
}

install_minio() {
  sed "s|MINIO_IMAGE|$MINIO_IMAGE|" "$HERE/minio/minio.yaml" | kubectl apply -f -
  rolled_out storage deployment/minio
}

# image_flags VALUE IMAGE: REPOSITORY:TAG as Helm's flags.
image_flags() { echo "--set-string $1.repository=${2%:*},$1.tag=${2##*:}"; }

install_chart() {
  kubectl get namespace "$FEDERATION" >/dev/null 2>&1 || kubectl create namespace "$FEDERATION"
  # shellcheck disable=SC2046 # each prints two words
  helm upgrade --install gradsharding "$ROOT/helm/gradsharding" --namespace "$SYSTEM" --create-namespace --take-ownership \
    --wait --timeout 300s --set "watchNamespaces={$FEDERATION}" \
    --set-string functions.cpuRequest=100m,operator.resources.requests.cpu=20m \
    $(image_flags image "$OPERATOR_IMAGE") $(image_flags functions.image "$REDUCER_IMAGE")
}

# The README's two commands.
try_sample() {
  kubectl kustomize "$ROOT/crds/samples" | sed "s|image: gradsharding-operator:.*|image: $OPERATOR_IMAGE|" \
    | kubectl apply -n "$FEDERATION" -f -
  kubectl wait -n "$FEDERATION" --for=condition=Succeeded --timeout=300s agground/digits-7
  kubectl logs -n "$FEDERATION" job/digits-7-clients
  kubectl get -n "$FEDERATION" agground
}

e2e() {
  local node
  node=$(kubectl get nodes -o jsonpath='{.items[0].status.addresses[?(@.type=="InternalIP")].address}')
  S3_ENDPOINT=http://$node:30900 MINIO_ENDPOINT=http://$node:30900 \
    AWS_ACCESS_KEY_ID=$MINIO_KEY AWS_SECRET_ACCESS_KEY=$MINIO_KEY AWS_REGION=us-east-1 \
    E2E_OPERATOR_IMAGE=$OPERATOR_IMAGE E2E_REDUCER_IMAGE=$REDUCER_IMAGE KUBECONFIG=${KUBECONFIG:-$HOME/.kube/config} \
    "$PYTEST" -m cluster "$ROOT/tests/e2e/test_chart.py" "$ROOT/tests/e2e/test_samples.py"
}

# What the steps above have put into a cluster, without the cluster. Rounds first: their clean-up needs the operator.
remove() {
  kubectl delete agground --all -n "$FEDERATION" --ignore-not-found --timeout=120s
  helm uninstall gradsharding --namespace "$SYSTEM" --ignore-not-found
  kubectl delete namespace "$SYSTEM" "$FEDERATION" storage --ignore-not-found --wait=false
}

down() { kind delete cluster --name "$CLUSTER"; }

[ $# -gt 0 ] || { sed -n '2,10s/^# \{0,1\}//p' "$0" >&2; exit 2; }
for step in "$@"; do
  [ "$(type -t "$step")" = function ] || { say "no step $step"; exit 2; }
  say "$step"
  "$step"
done
