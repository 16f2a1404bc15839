{{/* The name of all objects. KubeRay allows a RayService 47 characters. */}}
{{- define "triforce.name" -}}
{{- $name := .Values.fullnameOverride | default .Release.Name -}}
{{- if not (regexMatch "^[a-z]([-a-z0-9]{0,45}[a-z0-9])?$" $name) -}}
{{- fail (printf "fullnameOverride, or the release's name, %q: must begin with a letter and have at most 47 of a-z, 0-9 and -" $name) -}}
{{- end -}}
{{- $name -}}
{{- end -}}

{{/* The service that KubeRay makes for the pods with a Serve proxy. */}}
{{- define "triforce.service" -}}
{{ include "triforce.name" . }}-serve-svc
{{- end -}}

{{- define "triforce.selector" -}}
app.kubernetes.io/part-of: triforce
app.kubernetes.io/instance: {{ include "triforce.name" . }}
{{- end -}}

{{- define "triforce.labels" -}}
{{ include "triforce.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end -}}

{{/* The Redis that the chart runs, its service and its volume; and the secret with the password of whichever Redis it is. */}}
{{- define "triforce.redis" -}}{{ include "triforce.name" . }}-redis{{- end -}}
{{- define "triforce.redisSecret" -}}
{{ .Values.redis.passwordSecret | default (ternary (include "triforce.redis" .) "" .Values.redis.create) }}
{{- end -}}

{{- define "triforce.device" -}}
{{- .Values.settings.device | default "cpu" -}}
{{- end -}}

{{- define "triforce.image" -}}
{{- $variant := ternary "cpu" "cuda" (eq (include "triforce.device" .) "cpu") -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default (print .Chart.AppVersion "-" $variant) }}
{{- end -}}

{{- define "triforce.serviceAccount" -}}
{{ .Values.serviceAccount.name | default (ternary (include "triforce.name" .) "default" .Values.serviceAccount.create) }}
{{- end -}}

{{/* The claim with the models: an existing one, one of ours, or none. */}}
{{- define "triforce.claim" -}}
{{- $claim := .Values.models.claim -}}
{{- if $claim.name }}{{ $claim.name }}{{ else if $claim.size }}{{ include "triforce.name" . }}-models{{ end -}}
{{- end -}}

{{/* The models that are ids of the hub, as in `resolve` of triforce_core/models/files.py: a JSON list. */}}
{{- define "triforce.hubModels" -}}
{{- $models := list -}}
{{- range $tier := list "target" "retrieval" "draft" -}}
  {{- $model := (get $.Values.settings $tier | default dict).model | default "demo" -}}
  {{- if not (or (has $model (list "demo" "smollm2" "ngram")) (regexMatch "^[/.~]|[.]gguf$" $model)) }}{{ $models = append $models $model }}{{ end -}}
{{- end -}}
{{- toJson (uniq $models) -}}
{{- end -}}

{{/* Where the models of the hub are in a claim of ours; empty: each pod downloads them. */}}
{{- define "triforce.hubCache" -}}
{{- if and .Values.models.claim.size (ne (include "triforce.hubModels" .) "[]") }}/models/hub{{ end -}}
{{- end -}}

{{/* The seconds that requests have to finish: server.drain_s of the settings. */}}
{{- define "triforce.drain" -}}
{{- $server := .Values.settings.server | default dict -}}
{{- $drain := $server.drain_timeout_s -}}
{{- if kindIs "invalid" $drain }}{{ $drain = $server.request_timeout_s | default 600 }}{{ end -}}
{{- ceil $drain | int64 -}}
{{- end -}}

{{/* The seconds that a request may take: server.request_timeout_s of the settings. */}}
{{- define "triforce.timeout" -}}
{{- ceil ((.Values.settings.server | default dict).request_timeout_s | default 600) | int64 -}}
{{- end -}}

{{/* Pods may live a minute longer than requests have to finish, so that their processes can stop after that. */}}
{{- define "triforce.grace" -}}
{{- add (include "triforce.drain" . | int) 60 -}}
{{- end -}}

{{/* placement.colocate: unless set, and where it is auto, "all" if settings.deterministic or settings.target.eviction needs it. */}}
{{- define "triforce.colocate" -}}
{{- $settings := .Values.settings -}}
{{- $evicts := ne (($settings.target | default dict).eviction | default "none") "none" -}}
{{- $given := ($settings.placement | default dict).colocate | default "auto" -}}
{{- ne $given "auto" | ternary $given (ternary "all" "none" (or $evicts ($settings.deterministic | default false))) -}}
{{- end -}}

{{/*
The processes of a pipeline, and what their pods need: a JSON object of groups by name, each with its tiers, its GPUs and
whether it has the target. Mirrors COLOCATED and DeviceGroup of triforce_core/config.py.
*/}}
{{- define "triforce.groups" -}}
{{- $settings := .Values.settings -}}
{{- $placement := $settings.placement | default dict -}}
{{- $colocate := include "triforce.colocate" . -}}
{{- $processes := list (list "target") (list "retrieval") (list "draft") -}}
{{- if eq $colocate "all" }}{{ $processes = list (list "target" "retrieval" "draft") }}{{ end -}}
{{- if eq $colocate "draft_with_retrieval" }}{{ $processes = list (list "target") (list "retrieval" "draft") }}{{ end -}}
{{- $targetRanks := ($settings.target | default dict).tensor_parallel | default 1 -}}
{{- $retrievalRanks := ($settings.retrieval | default dict).tensor_parallel | default $targetRanks -}}
{{- $ranksOf := dict "target" $targetRanks "retrieval" $retrievalRanks "draft" 1 -}}
{{- $groups := list -}}
{{- $whole := 0 -}}
{{- $shares := 0.0 -}}
{{- $sharing := 0 -}}
{{- range $tiers := $processes -}}
  {{- $ranks := 1 -}}
  {{- $each := 0.0 -}}
  {{- range $tier := $tiers -}}
    {{- $ranks = max $ranks (get $ranksOf $tier | int) -}}
    {{- $each = addf $each ((get $placement $tier | default dict).gpus | default 0 | float64) -}}
  {{- end -}}
  {{- $gpus := mulf $ranks $each -}}
  {{- if ge $each 1.0 }}{{ $whole = add $whole (int $gpus) }}{{ else if $each }}{{ $shares = addf $shares $gpus }}{{ $sharing = add $sharing $ranks }}{{ end -}}
  {{- $groups = append $groups (dict "name" (first $tiers) "tiers" $tiers "gpus" (ceil (subf $gpus 0.0001))) -}}
{{- end -}}
{{- if not .Values.workers.separate -}}
  {{/* A share is of one GPU. Shares that do not fit one GPU together get one each. */}}
  {{- $more := 0 -}}
  {{- if $sharing }}{{ $more = ternary 1 $sharing (le $shares 1.0001) }}{{ end -}}
  {{- $groups = list (dict "name" "pipeline" "tiers" (list "target" "retrieval" "draft") "gpus" (add $whole $more)) -}}
{{- end -}}
{{- toJson $groups -}}
{{- end -}}

{{/* The settings as the application gets them: the given ones, and what follows from being in a cluster. */}}
{{- define "triforce.settings" -}}
{{- $settings := deepCopy .Values.settings -}}
{{- $server := $settings.server | default dict -}}
{{- $placement := $settings.placement | default dict -}}
{{- if not .Values.workers.separate -}}
  {{- $placement = merge $placement (dict "strategy" "STRICT_PACK") -}}
{{- else -}}
  {{- range $group := include "triforce.groups" . | fromJsonArray -}}
    {{- range $tier := $group.tiers -}}
      {{- $own := deepCopy (get $placement $tier | default dict) -}}
      {{- $_ := set $own "labels" (merge (dict "triforce/tier" $group.name) ($own.labels | default dict)) -}}
      {{- $_ := set $placement $tier $own -}}
    {{- end -}}
  {{- end -}}
{{- end -}}
{{- if .Values.apiKeysSecret }}{{ $_ := set $server "api_keys" "/etc/triforce/api_keys" }}{{ end -}}
{{- $_ := set $settings "server" (merge (dict "host" "0.0.0.0") $server) -}}
{{- $_ := set $settings "placement" $placement -}}
{{- toYaml $settings -}}
{{- end -}}

{{/* Serve's own ports in pods, behind the front. */}}
{{- define "triforce.servePort" -}}28000{{- end -}}
{{- define "triforce.serveGrpcPort" -}}29000{{- end -}}

{{/* The settings of the front: those of settings.server that it reads. A change of others need not change pods. */}}
{{- define "triforce.front" -}}
{{- $read := pick (.Values.settings.server | default dict) "host" "port" "grpc_port" "request_timeout_s" "connections_per_peer" -}}
{{- $server := merge (dict "host" "0.0.0.0") $read -}}
{{- if .Values.tlsSecret }}{{ $server = merge $server (dict "certificate" "/etc/triforce-tls/tls.crt" "certificate_key" "/etc/triforce-tls/tls.key") }}{{ end -}}
{{- toJson $server -}}
{{- end -}}

{{- define "triforce.scheme" -}}{{ ternary "https" "http" (not (empty .Values.tlsSecret)) }}{{- end -}}

{{/*
What the values need of the cluster: kinds, secrets, the claim. `helm template` knows no cluster, and checks nothing;
the names of kinds are known only from a real one. Older versions of Helm find no object in a dry run.
*/}}
{{- define "triforce.checkCluster" -}}
{{- $has := .Capabilities.APIVersions -}}
{{- if $has.Has "v1/Pod" -}}
  {{- if and .Values.podMonitor.enabled (not ($has.Has "monitoring.coreos.com/v1/PodMonitor")) -}}
  {{- fail "podMonitor.enabled: this cluster has no PodMonitor: install Prometheus' operator, or set it to false" -}}
  {{- end -}}
  {{- if and .Values.gateway.parentRefs (not ($has.Has "gateway.networking.k8s.io/v1/HTTPRoute")) -}}
  {{- fail "gateway.parentRefs: this cluster has no HTTPRoute: install the Gateway API, or leave it empty" -}}
  {{- end -}}
  {{- if and .Values.gateway.grpcHostnames (not ($has.Has "gateway.networking.k8s.io/v1/GRPCRoute")) -}}
  {{- fail "gateway.grpcHostnames: this cluster has no GRPCRoute: install the Gateway API 1.1, or leave it empty" -}}
  {{- end -}}
{{- end -}}
{{- $in := .Release.Namespace -}}
{{- $monitor := (.Values.podMonitor.authorization | default dict).credentials | default dict -}}
{{- $secrets := list
    (list "apiKeysSecret" .Values.apiKeysSecret "api_keys")
    (list "tlsSecret" .Values.tlsSecret "tls.crt")
    (list "rayTokenSecret" .Values.rayTokenSecret "auth_token")
    (list "models.hub.tokenSecret" .Values.models.hub.tokenSecret .Values.models.hub.tokenKey)
    (list "redis.passwordSecret" .Values.redis.passwordSecret .Values.redis.passwordKey)
    (list "podMonitor.authorization" (ternary $monitor.name "" .Values.podMonitor.enabled) $monitor.key) -}}
{{- $named := list .Values.models.claim.name -}}
{{- range $secrets }}{{ $named = append $named (index . 1) }}{{ end -}}
{{- /* Every namespace that exists has this account. Where nothing is named, no right to look is needed. */}}
{{- if and (compact $named) (lookup "v1" "ServiceAccount" $in "default") -}}
  {{- range $secrets -}}
    {{- if and (index . 1) (not (hasKey ((lookup "v1" "Secret" $in (index . 1)).data | default dict) (index . 2))) -}}
    {{- fail (printf "%s: namespace %s has no secret %q with a key %q" (index . 0) $in (index . 1) (index . 2)) -}}
    {{- end -}}
  {{- end -}}
  {{- with .Values.models.claim.name -}}
    {{- if not (lookup "v1" "PersistentVolumeClaim" $in .) -}}
    {{- fail (printf "models.claim.name: namespace %s has no PersistentVolumeClaim %q" $in .) -}}
    {{- end -}}
  {{- end -}}
{{- end -}}
{{- end -}}

{{/* The rules that a schema cannot state. */}}
{{- define "triforce.check" -}}
{{- $settings := .Values.settings -}}
{{- $server := $settings.server | default dict -}}
{{- $port := $server.port | default 8000 | int -}}
{{- $grpc := $server.grpc_port | default 9000 | int -}}
{{- if eq $port $grpc }}{{ fail (printf "settings.server.grpc_port: %d must not be settings.server.port" $grpc) }}{{ end -}}
{{- range $name, $number := dict "port" $port "grpc_port" $grpc -}}
  {{/* Ports of Ray (head, agents, workers from 10002 on) and of Serve (itself, statistics, metrics, its replicas). */}}
  {{- if or (has $number (list 6379 8080 8265 8404 9101 28000 29000 52365)) (and (ge $number 10001) (le $number 19999)) (ge $number 30000) -}}
    {{- fail (printf "settings.server.%s: %d is a port that Ray uses in pods" $name $number) -}}
  {{- end -}}
{{- end -}}
{{- $placement := $settings.placement | default dict -}}
{{- $gpus := 0.0 -}}
{{- range $group := include "triforce.groups" . | fromJsonArray }}{{ $gpus = addf $gpus $group.gpus }}{{ end -}}
{{- $device := include "triforce.device" . -}}
{{- if and (ne $device "cpu") (eq $gpus 0.0) -}}
{{- fail (printf "settings.placement: target.gpus, retrieval.gpus or draft.gpus must be above 0 where settings.device is %s" $device) -}}
{{- end -}}
{{- if and (eq $device "cpu") (gt $gpus 0.0) -}}
{{- fail "settings.device: must be cuda where settings.placement reserves GPUs" -}}
{{- end -}}
{{- $processes := dict "none" 3 "draft_with_retrieval" 2 "all" 1 -}}
{{- if and (not .Values.workers.separate) (eq ($placement.strategy | default "") "STRICT_SPREAD") (gt (get $processes (include "triforce.colocate" .) | int) 1) -}}
{{- fail "settings.placement.strategy: STRICT_SPREAD needs workers.separate: true, or else a pipeline is one pod" -}}
{{- end -}}
{{- with ($settings.target | default dict).offload_path -}}
{{- if or (not (hasPrefix "/" .)) (has (trimSuffix "/" .) (list "" "/tmp" "/models" "/home/triforce" "/dev/shm")) -}}
{{- fail (printf "settings.target.offload_path: %q must be an absolute path, at which a volume of its own is mounted" .) -}}
{{- end -}}
{{- end -}}
{{- if and (not (kindIs "invalid" $placement.cpu_latency_us)) (not .Values.workers.cpuLatencyResource) -}}
{{- fail "settings.placement.cpu_latency_us: workers.cpuLatencyResource must name what gives pods /dev/cpu_dma_latency" -}}
{{- end -}}
{{- $replicas := ($settings.server | default dict).replicas | default dict -}}
{{- if gt ($replicas.min | default 1 | int) ($replicas.max | default 1 | int) -}}
{{- fail (printf "settings.server.replicas.min: %v must be at most max %v" $replicas.min ($replicas.max | default 1)) -}}
{{- end -}}
{{- if ($settings.server | default dict).api_keys -}}
{{- fail "settings.server.api_keys: must not be set in a cluster: apiKeysSecret names the secret with the keys" -}}
{{- end -}}
{{- if or ($settings.server | default dict).certificate ($settings.server | default dict).certificate_key -}}
{{- fail "settings.server.certificate: must not be set in a cluster: tlsSecret names the secret with certificate and key" -}}
{{- end -}}
{{- if and .Values.podMonitor.enabled .Values.apiKeysSecret (not .Values.podMonitor.authorization) -}}
{{- fail "podMonitor.authorization: must name a secret with an API key where apiKeysSecret is set, or else the server answers every scrape with 401" -}}
{{- end -}}
{{- if and (include "triforce.claim" .) .Values.models.image.reference -}}
{{- fail "models.image.reference: must be empty where models.claim is given" -}}
{{- end -}}
{{- if and .Values.models.claim.name .Values.models.claim.size -}}
{{- fail "models.claim.size: must be empty where models.claim.name names an existing claim" -}}
{{- end -}}
{{- if and .Values.ingress.grpcHost (eq .Values.ingress.grpcHost .Values.ingress.host) -}}
{{- fail "ingress.grpcHost: must not be ingress.host" -}}
{{- end -}}
{{- if and .Values.redis.create .Values.redis.address -}}
{{- fail "redis.address: must be empty where redis.create is true" -}}
{{- end -}}
{{- include "triforce.checkCluster" . -}}
{{- end -}}
