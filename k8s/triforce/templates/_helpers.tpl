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

{{- define "triforce.device" -}}
{{- .Values.settings.device | default "cpu" -}}
{{- end -}}

{{- define "triforce.image" -}}
{{- $variant := ternary "cpu" "cuda" (eq (include "triforce.device" .) "cpu") -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default (print .Chart.AppVersion "-" $variant) }}
{{- end -}}

{{- define "triforce.serviceAccount" -}}
{{ .Values.serviceAccount.name | default (include "triforce.name" .) }}
{{- end -}}

{{/* The claim with the models: an existing one, one of ours, or none. */}}
{{- define "triforce.claim" -}}
{{- $claim := .Values.models.claim -}}
{{- if $claim.name }}{{ $claim.name }}{{ else if $claim.size }}{{ include "triforce.name" . }}-models{{ end -}}
{{- end -}}

{{/* The seconds that requests have to finish: server.drain_s of the settings. */}}
{{- define "triforce.drain" -}}
{{- $server := .Values.settings.server | default dict -}}
{{- $drain := $server.drain_timeout_s -}}
{{- if kindIs "invalid" $drain }}{{ $drain = $server.request_timeout_s | default 600 }}{{ end -}}
{{- ceil $drain -}}
{{- end -}}

{{/* Pods live longer than requests may take to finish, so that what comes after has its time too. */}}
{{- define "triforce.grace" -}}
{{- add (include "triforce.drain" . | int) 60 -}}
{{- end -}}

{{/*
The processes of a pipeline, and what their pods need: a JSON object of groups by name, each with its tiers, its GPUs and
whether it has the target. Mirrors COLOCATED and DeviceGroup of triforce_core/config.py.
*/}}
{{- define "triforce.groups" -}}
{{- $settings := .Values.settings -}}
{{- $placement := $settings.placement | default dict -}}
{{- $colocate := $placement.colocate | default (ternary "all" "none" ($settings.deterministic | default false)) -}}
{{- $processes := list (list "target") (list "retrieval") (list "draft") -}}
{{- if eq $colocate "all" }}{{ $processes = list (list "target" "retrieval" "draft") }}{{ end -}}
{{- if eq $colocate "draft_with_retrieval" }}{{ $processes = list (list "target") (list "retrieval" "draft") }}{{ end -}}
{{- $targetRanks := ($settings.target | default dict).tensor_parallel | default 1 -}}
{{- $retrievalRanks := ($settings.retrieval | default dict).tensor_parallel | default $targetRanks -}}
{{- $ranksOf := dict "target" $targetRanks "retrieval" $retrievalRanks "draft" 1 -}}
{{- $groups := list -}}
{{- $all := 0.0 -}}
{{- range $tiers := $processes -}}
  {{- $ranks := 1 -}}
  {{- $each := 0.0 -}}
  {{- range $tier := $tiers -}}
    {{- $ranks = max $ranks (get $ranksOf $tier | int) -}}
    {{- $each = addf $each ((get $placement $tier | default dict).gpus | default 0 | float64) -}}
  {{- end -}}
  {{- $gpus := mulf $ranks $each -}}
  {{- $all = addf $all $gpus -}}
  {{- $groups = append $groups (dict "name" (first $tiers) "tiers" $tiers "gpus" (ceil (subf $gpus 0.0001))) -}}
{{- end -}}
{{- if not .Values.workers.separate -}}
  {{- $groups = list (dict "name" "pipeline" "tiers" (list "target" "retrieval" "draft") "gpus" (ceil (subf $all 0.0001))) -}}
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

{{/* The rules that a schema cannot state. */}}
{{- define "triforce.check" -}}
{{- $settings := .Values.settings -}}
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
{{- if and (include "triforce.claim" .) .Values.models.image.reference -}}
{{- fail "models.image.reference: must be empty where models.claim is given" -}}
{{- end -}}
{{- if and .Values.models.claim.name .Values.models.claim.size -}}
{{- fail "models.claim.size: must be empty where models.claim.name names an existing claim" -}}
{{- end -}}
{{- if and .Values.ingress.grpcHost (eq .Values.ingress.grpcHost .Values.ingress.host) -}}
{{- fail "ingress.grpcHost: must not be ingress.host" -}}
{{- end -}}
{{- end -}}
